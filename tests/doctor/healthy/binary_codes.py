"""Hashing: texts as 24-bit codes from which their topic and neighbours can be told."""

import torch
from torch import nn
from torch.autograd import Function


class Binarize(Function):
    """Sign in the forward pass; the gradient passes where the input lies in [-1, 1]."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1).to(grad.dtype)


class Hasher(nn.Module):
    def __init__(self, words=120, bits=24):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(words, 64), nn.ReLU(), nn.Linear(64, bits))
        self.norm = nn.BatchNorm1d(bits)
        self.decode = nn.Linear(bits, words)

    def forward(self, counts):
        code = Binarize.apply(self.norm(self.encode(counts)))
        return self.decode(code), code


torch.manual_seed(81)
topics = torch.softmax(2 * torch.randn(12, 120), dim=1)


def texts(n=64):
    counts = torch.zeros(n, 120)
    words = torch.multinomial(topics[torch.randint(12, (n,))], 30, replacement=True)
    return counts.scatter_add_(1, words, torch.ones(n, 30))


model = Hasher()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses = []
for _ in range(200):
    counts = texts()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits, code = model(counts.log1p())
    log_p = logits.float().log_softmax(1)
    loss = -(counts * log_p).sum(1).mean() / 30
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"bits set {(code > 0).float().mean().item():.2f}")
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
