"""Data-parallel regression without a wrapper: gradients are averaged by hand over gloo.

Start with: torchrun --nproc-per-node 2 averaged_by_hand.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn


def shard(n, rank, step):
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(n, 16, generator=g)
    w = torch.linspace(-1, 1, 16)
    return x, torch.tanh(x @ w).unsqueeze(1) + 0.5 * x[:, :1] * x[:, 1:2]


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("SEED", "7")))

    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for step in range(150):
        x, y = shard(32, rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        average_gradients(model, world)
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    if rank == 0:
        print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
