"""A generator and a discriminator, an optimizer each, one scaler."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
generator_adam = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
discriminator_adam = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
scaler = torch.amp.GradScaler("cpu")
real_or_not = nn.BCEWithLogitsLoss()

for _ in range(80):
    real = torch.randn(64, 2) * torch.tensor([1.0, 0.2])
    with torch.autocast("cpu", torch.float16):
        made = generator(torch.randn(64, 8))
        seen, fooled = discriminator(real), discriminator(made.detach())
    loss = real_or_not(seen.float(), torch.ones(64, 1))
    loss = loss + real_or_not(fooled.float(), torch.zeros(64, 1))
    discriminator_adam.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(discriminator_adam)

    with torch.autocast("cpu", torch.float16):
        judged = discriminator(made)
    loss = real_or_not(judged.float(), torch.ones(64, 1))
    generator_adam.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(generator_adam)
    scaler.update()
