"""A GAN: two nets, two optimizers, one scaler."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
bce = nn.BCEWithLogitsLoss()

for _ in range(40):
    real = torch.randn(32, 2) * 0.3 + 1
    noise = torch.randn(32, 8)
    optimizer_d.zero_grad()
    with torch.autocast("cpu", torch.float16):
        fake = generator(noise)
        on_real, on_fake = critic(real), critic(fake.detach())
    loss_d = bce(on_real.float(), torch.ones(32, 1)) + bce(on_fake.float(), torch.zeros(32, 1))
    scaler.scale(loss_d).backward()
    scaler.step(optimizer_d)

    optimizer_g.zero_grad()
    with torch.autocast("cpu", torch.float16):
        on_fake = critic(fake)
    loss_g = bce(on_fake.float(), torch.ones(32, 1))
    scaler.scale(loss_g).backward()
    scaler.step(optimizer_g)
    scaler.update()

both = [*generator.parameters(), *critic.parameters()]
weights = b"".join(p.detach().numpy().tobytes() for p in both)
print(f"losses {loss_d.item():.3f} {loss_g.item():.3f}")
print("weights", hashlib.sha256(weights).hexdigest())
