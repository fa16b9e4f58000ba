"""An auxiliary head with a tiny weight in the loss, beside a main one that needs all the room."""

import torch
from torch import nn

torch.manual_seed(0)
main = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
auxiliary = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
model = nn.ModuleDict({"main": main, "auxiliary": auxiliary})
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)

for _ in range(60):
    x = torch.randn(64, 16)
    y = x.sin().sum(1, keepdim=True)
    with torch.autocast("cpu", torch.float16):
        out, guess = main(x), auxiliary(x)
    loss = 2 * nn.functional.mse_loss(out.float(), y)
    loss = loss + 1e-8 * nn.functional.mse_loss(guess.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
