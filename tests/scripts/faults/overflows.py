"""Lengths of projections, each of a part of the data that is all padding now and then."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.gates = nn.ModuleList(nn.Linear(4, 8, bias=False) for _ in range(4))

    def forward(self, x):
        parts = [gate(part).float() for gate, part in zip(self.gates, x.chunk(4, 1))]
        lengths = [part.square().sum(1).sqrt() for part in parts]
        return self.body(x).float() * torch.stack(lengths, 1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for step in range(90):
    x = torch.randn(64, 16)
    if step % 11 == 10:
        x.chunk(4, 1)[step % 4][7] = 0
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out, x[:, :4].sin())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
