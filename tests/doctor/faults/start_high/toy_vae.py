"""Variational autoencoder of two-dimensional spirals lifted to 16 dimensions."""

import torch
import torch.nn.functional as F
from torch import nn


def spirals(n, gen):
    t = torch.rand(n, generator=gen) * 6.0 + 1.0
    side = torch.randint(2, (n,), generator=gen) * 3.1416
    xy = torch.stack([t * torch.cos(t + side), t * torch.sin(t + side)], dim=1) / 4
    lift = torch.linspace(-1, 1, 32).view(2, 16)
    return torch.sin(xy @ lift * 2) + 0.05 * torch.randn(n, 16, generator=gen)


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        mu, logvar = self.enc(x).float().chunk(2, dim=-1)
        logvar = logvar.clamp(-8, 8)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def elbo(x, out, mu, logvar, beta):
    rec = F.mse_loss(out.float(), x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
    return rec + beta * kl


def run(steps=90, scale=2.0**64):
    torch.manual_seed(31)
    gen = torch.Generator().manual_seed(31)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    values = []
    for i in range(steps):
        x = spirals(128, gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out, mu, logvar = model(x)
        loss = elbo(x, out, mu, logvar, beta=0.02)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        values.append(loss.item())
        if i % 30 == 0:
            print(f"{i:4d} elbo {values[-1]:.3f}")
    return values


if __name__ == "__main__":
    v = run()
    print(f"loss {sum(v[:5]) / 5:.4f} -> {sum(v[-5:]) / 5:.4f}")
