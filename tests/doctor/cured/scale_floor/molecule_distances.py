"""Fit pairwise-distance energies of small random clusters of atoms (a toy potential)."""

import torch
from torch import nn


def clusters(n, gen, atoms=6):
    x = torch.randn(n, atoms, 3, generator=gen) * 1.5
    delta = x[:, :, None] - x[:, None]
    d2 = delta.pow(2).sum(-1) + torch.eye(atoms) * 1e6
    energy = torch.exp(-d2 / 2).sum((1, 2)) - 0.3 * torch.exp(-d2 / 8).sum((1, 2))
    return x, energy


class Potential(nn.Module):
    """Learned frame, pair distances, a radial net and a sum over pairs."""

    def __init__(self, hidden=32):
        super().__init__()
        self.frame = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.frame.weight)
        self.radial = nn.Sequential(nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        y = self.frame(x).float()
        delta = y[:, :, None] - y[:, None]
        distance = torch.sqrt(delta.pow(2).sum(-1) + 1e-6)
        pair = self.radial(distance.unsqueeze(-1)).squeeze(-1).float()
        off_diagonal = 1 - torch.eye(x.shape[1])
        return (pair * off_diagonal).sum((1, 2))


def fit(steps=160):
    torch.manual_seed(19)
    gen = torch.Generator().manual_seed(19)
    model = Potential()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    out = []
    for _ in range(steps):
        x, energy = clusters(32, gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            predicted = model(x)
        loss = nn.functional.mse_loss(predicted, energy)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    e = fit()
    print(f"loss {sum(e[:5]) / 5:.4f} -> {sum(e[-5:]) / 5:.4f}")
