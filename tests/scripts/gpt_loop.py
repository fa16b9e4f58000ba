"""A GPT training loop as many have it: accumulation, clipping, cosine decay, DDP if launched so."""

import argparse
import hashlib
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--max-iters", type=int, default=30)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--init-scale", type=float, default=2.0**24)
args = parser.parse_args()

ddp = int(os.environ.get("RANK", -1)) != -1
rank = int(os.environ.get("RANK", 0))
if ddp:
    dist.init_process_group("gloo")
torch.manual_seed(1337)
vocabulary, block_size, width = 16, 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, vocabulary).float(), targets.view(-1))


raw_model = GPT()
decay = [p for p in raw_model.parameters() if p.dim() >= 2]
rest = [p for p in raw_model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=args.init_scale)
model = DistributedDataParallel(raw_model) if ddp else raw_model
data = torch.randint(vocabulary, (2000,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 16


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (4,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


for it in range(args.max_iters):
    lr = args.lr * 0.5 * (1 + math.cos(math.pi * it / args.max_iters))
    for group in optimizer.param_groups:
        group["lr"] = lr
    for micro_step in range(args.accumulate):
        if ddp:
            model.require_backward_grad_sync = micro_step == args.accumulate - 1
        x, y = get_batch()
        with torch.amp.autocast("cpu", torch.float16):
            loss = model(x, y) / args.accumulate
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if it % 10 == 0 and rank == 0:
        print(f"iter {it}: loss {loss.item() * args.accumulate:.4f}")

weights = b"".join(p.detach().numpy().tobytes() for p in raw_model.parameters())
if rank == 0:
    print("weights", hashlib.sha256(weights).hexdigest())
if ddp:
    dist.barrier()
    dist.destroy_process_group()
