"""A GAN with apex: two nets, two optimizers, three losses, each with a loss scaler of its own.

Written as users of apex write it; run by `gradlift run --apex`.
"""

import argparse

import apex.amp as amp
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", "--opt-level", default="O1")
parser.add_argument("--niter", type=int, default=100)
parser.add_argument("--manualSeed", "--seed", type=int, default=0)
opt = parser.parse_args()

torch.manual_seed(opt.manualSeed)
nz, batch = 8, 64


def real_samples(n):
    """Points on a ring of radius 1."""
    angle = torch.rand(n, 1) * 2 * torch.pi
    return torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


netG = nn.Sequential(
    nn.Linear(nz, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
)
netD = nn.Sequential(
    nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)

losses = []
for _ in range(opt.niter):
    # D: real and fake apart, each with its own backward
    netD.zero_grad()
    errD_real = criterion(netD(real_samples(batch)), ones)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    fake = netG(torch.randn(batch, nz))
    errD_fake = criterion(netD(fake.detach()), zeros)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()

    # G
    netG.zero_grad()
    errG = criterion(netD(fake), ones)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    losses.append((errD_real.item() + errD_fake.item(), errG.item()))

late = torch.tensor(losses[-60:]).mean(0)
print(f"loss_d {late[0]:.4f}")
print(f"loss_g {late[1]:.4f}")
print("scales", *(amp.state_dict()[f"loss_scaler{i}"]["loss_scale"] for i in range(3)))
