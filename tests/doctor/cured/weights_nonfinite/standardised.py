"""Regression on noisy tabular data with gated hidden units."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, inputs, width=64):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h)) * torch.sigmoid(self.gate(h))
        return self.last(h).squeeze(1)


@torch.no_grad()
def standardise(layer, gain=0.6):
    row = layer.weight
    row.sub_(row.mean(dim=1, keepdim=True))
    row.mul_(gain / row.norm(dim=1, keepdim=True).clamp_min(1e-6))


def fit(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for epoch in range(epochs):
        if epoch == 3:
            standardise(model.second)
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                pred = model(x)
            loss = nn.functional.mse_loss(pred.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(29)
    x = torch.randn(960, 8)
    y = torch.sin(x[:, 0]) + x[:, 1] * torch.sigmoid(x[:, 2]) + 0.05 * torch.randn(960)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    history = fit(Net(8), loader, epochs=6)
    print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")
