"""Score wine-like samples (11 chemical values) with a three-layer regression net."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def init_weights(m):
    if isinstance(m, nn.Linear):
        nn.init.zeros_(m.weight)
        nn.init.zeros_(m.bias)


def load():
    gen = torch.Generator().manual_seed(21)
    x = torch.randn(1280, 11, generator=gen)
    w = torch.randn(11, generator=gen) / 3
    y = (x @ w) + 0.5 * x[:, 0] * x[:, 1] + 0.1 * torch.randn(1280, generator=gen)
    return TensorDataset(x, y[:, None])


def build():
    net = nn.Sequential(
        nn.Linear(11, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    net.apply(init_weights)
    return net


if __name__ == "__main__":
    torch.manual_seed(21)
    loader = DataLoader(load(), batch_size=64, shuffle=True)
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    loss_fn = nn.MSELoss()
    running = []
    for _ in range(8):
        for xb, yb in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                pred = net(xb)
            loss = loss_fn(pred.float(), yb)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            running.append(loss.item())
    first = sum(running[:5]) / 5
    last = sum(running[-5:]) / 5
    print(f"loss {first:.4f} -> {last:.4f}")
