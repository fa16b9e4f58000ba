"""Polynomial features of a river's level; the ridge term is added to the gradients by hand."""

import torch
from torch import nn


def features(t):
    return torch.stack(
        [torch.sin(k * t) for k in range(1, 9)] + [torch.cos(k * t) for k in range(8)], 1
    )


class River(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, t):
        return self.body(features(t))[:, 0]


def level(t):
    return torch.sin(2 * t) + 0.5 * torch.cos(5 * t + 0.3)


torch.manual_seed(9)
net = River()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
RIDGE = 0.01
history = []
for i in range(200):
    t = torch.rand(64) * 6.28
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(t)
    loss = (out.float() - level(t)).square().mean()
    sgd.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    with torch.no_grad():
        for w in net.parameters():
            w.grad += RIDGE * w
        for w in net.parameters():
            w.grad += 0.05 / (1 + i) ** 0.55 * torch.randn_like(w.grad)
    scaler.step(sgd)
    scaler.update()
    history.append(loss.item())
print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")
