"""A branch whose units are always off, by a bias far below zero."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.branch = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1)
        nn.init.constant_(self.branch.bias, -50.0)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.head(x + self.branch(x).relu())


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for _ in range(60):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), x.sin().sum(1, keepdim=True) / 4)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
