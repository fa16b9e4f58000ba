"""Variational autoencoder of blobs on a 10x10 grid."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(31)


class VAE(nn.Module):
    def __init__(self, pixels=100, hidden=64, latent=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h).float(), self.logvar(h).float().clamp(-6, 6)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z).float(), mu, logvar


def blobs(n):
    grid = torch.stack(torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij"), -1)
    centre = 2 + 6 * torch.rand(n, 1, 1, 2)
    return torch.exp(-((grid - centre) ** 2).sum(-1) / 4).flatten(1)


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []
for step in range(250):
    x = blobs(64)
    with torch.autocast("cpu", dtype=torch.float16):
        recon, mu, logvar = model(x)
    bce = F.binary_cross_entropy_with_logits(recon, x, reduction="none").sum(1).mean()
    kld = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
    loss = bce + 0.2 * kld
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step}: bce {bce.item():.2f} kld {kld.item():.2f}")

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
