"""The length of a projection, taken of rows that are all padding now and then."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.gate = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        length = self.gate(x).float().square().sum(1, keepdim=True).sqrt()
        return self.body(x).float() * length


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for step in range(90):
    x = torch.randn(64, 16)
    if step % 11 == 10:
        x[7] = 0
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out, x.sin().sum(1, keepdim=True) / 4)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
