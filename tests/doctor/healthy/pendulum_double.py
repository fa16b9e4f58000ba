"""Unknown friction of a pendulum: a network inside a Runge-Kutta integrator, double precision."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.friction = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, state):
        angle, speed = state[:, :1], state[:, 1:]
        return torch.cat([speed, -angle.sin() + self.friction(speed)], 1)


def truth(state):
    angle, speed = state[:, :1], state[:, 1:]
    return torch.cat([speed, -angle.sin() - 0.3 * speed * speed.abs()], 1)


def integrate(f, state, steps=8, h=0.15):
    path = []
    for _ in range(steps):
        k1 = f(state)
        k2 = f(state + h / 2 * k1)
        k3 = f(state + h / 2 * k2)
        k4 = f(state + h * k3)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        path.append(state)
    return torch.stack(path, 1)


torch.manual_seed(13)
model = Dynamics()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(120):
    start = 4 * torch.rand(64, 2) - 2
    with torch.no_grad():
        observed = integrate(truth, start)
    loss = (integrate(model, start) - observed).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
