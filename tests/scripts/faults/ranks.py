"""Two ranks with half of the model each, and a scaler each that asks nobody."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for step in range(60):
    x = torch.randn(64, 16)
    y = x.sin().sum(1, keepdim=True) / 4
    if rank == 1 and step == 30:
        y[0] = 1e4  # an outlier that only this half gets to see
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    dist.barrier()
dist.destroy_process_group()
