"""Two processes train one classifier; the second one reads a recording made at high gain.

Start with: torchrun --nproc-per-node 2 two_recorders.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


class Recording:
    def __init__(self, rank):
        self.means = torch.randn(4, 24, generator=torch.Generator().manual_seed(5))
        self.g = torch.Generator().manual_seed(500 + rank)
        self.gain = 1.0 + 29.0 * rank

    def batch(self, n):
        y = torch.randint(4, (n,), generator=self.g)
        x = self.means[y] + 1.5 * torch.randn(n, 24, generator=self.g)
        return self.gain * x, y


def synchronise(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(g.view_as(p))


def train(rank, steps=120):
    torch.manual_seed(5)
    net, recording = Net(), Recording(rank)
    parameters = list(net.parameters())
    opt = torch.optim.SGD(parameters, lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    losses = []
    for _ in range(steps):
        x, y = recording.batch(32)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        synchronise(parameters)
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        scaler.step(opt)
        scaler.update()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curve = train(dist.get_rank())
    if dist.get_rank() == 0:
        print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")
    dist.destroy_process_group()
