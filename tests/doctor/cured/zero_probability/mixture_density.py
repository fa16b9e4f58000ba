"""Travel times between city districts with a mixture density network (rush hours: two modes)."""

import math

import torch
from torch import nn


def trips(n, gen):
    x = torch.rand(n, 4, generator=gen)
    rush = torch.rand(n, generator=gen) < 0.3 + 0.4 * x[:, 3]
    minutes = 4 + 9 * x[:, 0] + 3 * x[:, 1] * x[:, 2] + torch.where(rush, 8.0, 0.0)
    return x, minutes + torch.randn(n, generator=gen)


class MDN(nn.Module):
    def __init__(self, components=3, width=40):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.params = nn.Linear(width, 3 * components)

    def forward(self, x):
        weight, mean, log_sigma = self.params(self.body(x)).float().chunk(3, dim=-1)
        return weight, mean, log_sigma.clamp(-2, 4)


def nll(weight, mean, log_sigma, y):
    z = (y[:, None] - mean) / log_sigma.exp()
    log_density = -0.5 * z.square() - log_sigma - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(torch.log_softmax(weight, -1) + log_density, dim=-1).mean()


def main():
    torch.manual_seed(9)
    gen = torch.Generator().manual_seed(9)
    model = MDN()
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    curve = []
    for step in range(250):
        x, minutes = trips(96, gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            weight, mean, log_sigma = model(x)
        loss = nll(weight, mean, log_sigma, minutes)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        curve.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: {curve[-1]:.4f}")
    print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")


main()
