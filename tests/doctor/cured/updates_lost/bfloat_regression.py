"""Surrogate model of a heat exchanger: nine operating values in, outlet temperature out."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def simulate(n, gen):
    x = torch.rand(n, 9, generator=gen) * 2 - 1
    t = x[:, 0] * 1.2 - x[:, 1] * x[:, 2] + 0.6 * torch.sin(3 * x[:, 3]) + 0.4 * x[:, 4:].mean(1)
    return TensorDataset(x, t.unsqueeze(1))


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(9, 128)
        self.mid = nn.Linear(128, 128)
        self.out = nn.Linear(128, 1)
        for layer in (self.inp, self.mid, self.out):
            nn.init.orthogonal_(layer.weight)
            nn.init.constant_(layer.bias, 0.1)

    def forward(self, x):
        x = torch.nn.functional.silu(self.inp(x))
        x = torch.nn.functional.silu(self.mid(x))
        return self.out(x)


def main(epochs=15, dtype=torch.float32):
    torch.manual_seed(51)
    gen = torch.Generator().manual_seed(51)
    loader = DataLoader(simulate(1280, gen), batch_size=64, shuffle=True)
    model = Surrogate().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    curve = []
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            pred = model(x.to(dtype))
            loss = nn.functional.mse_loss(pred.float(), y)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        print(f"epoch {epoch} mse {sum(curve[-20:]) / 20:.4f}")
    print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
