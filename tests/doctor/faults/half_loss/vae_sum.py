"""VAE on synthetic spectra; the noise variance is put at its optimum."""

import torch
from torch import nn

torch.manual_seed(100)
CHANNELS, LATENT, BATCH = 512, 6, 64


class SpectrumVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(CHANNELS, 64), nn.ReLU(), nn.Linear(64, 2 * LATENT))
        self.decode = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, CHANNELS))

    def forward(self, x):
        mean, logvar = self.encode(x).float().chunk(2, dim=1)
        logvar = logvar.clamp(-8, 4)
        code = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        return self.decode(code), mean, logvar


axis = torch.linspace(-1, 1, CHANNELS)


def spectra(n):
    centre = 1.4 * torch.rand(n, 1) - 0.7
    height = 4 + 4 * torch.rand(n, 1)
    return height * torch.exp(-((axis - centre) ** 2) / 0.1) + 0.1 * torch.randn(n, CHANNELS)


def bound(output, x, mean, logvar):
    squared = ((output - x.to(output.dtype)) ** 2).sum()
    recon = 0.5 * torch.log(squared / x.numel() + 1e-4)
    kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(1).mean()
    return recon + kl / CHANNELS


model = SpectrumVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
curve = []
for _ in range(150):
    x = spectra(BATCH)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.float16):
        output, mean, logvar = model(x)
        loss = bound(output, x, mean, logvar)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    curve.append(loss.item())

print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")
