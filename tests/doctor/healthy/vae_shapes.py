"""Variational autoencoder of small binary shapes; the KL term is phased in."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self, pixels=100, hidden=96, latent=8):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(pixels, hidden), nn.GELU())
        self.mu, self.log_var = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, pixels))

    def forward(self, x):
        h = self.encode(x)
        mu, log_var = self.mu(h).float(), self.log_var(h).float().clamp(-10, 10)
        z = mu + torch.exp(0.5 * log_var) * torch.randn_like(mu)
        return self.decode(z).float(), mu, log_var


def shapes(n):
    r, c = torch.arange(10).view(1, 10, 1), torch.arange(10).view(1, 1, 10)
    top, left = torch.randint(0, 6, (2, n, 1, 1))
    height, width = torch.randint(2, 6, (2, n, 1, 1))
    inside = (r >= top) & (r < top + height) & (c >= left) & (c < left + width)
    return inside.float().flatten(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--kl-steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for step in range(args.steps):
        x = shapes(64)
        with torch.autocast("cpu", dtype=torch.float16):
            logits, mu, log_var = vae(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        kl = 0.5 * (mu.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        loss = reconstruction + min(1.0, step / args.kl_steps) * kl
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if step % 80 == 0:
            print(f"{step}: reconstruction {reconstruction.item():.2f} KL {kl.item():.2f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()
