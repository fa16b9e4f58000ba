"""Low-rank fine-tuning of a small pretrained regression net on a shifted task."""

import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scaling * ((x @ self.a.T) @ self.b.T)


def net():
    return nn.Sequential(
        nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)
    )


def task(shift, n, gen):
    x = torch.randn(n, 10, generator=gen)
    return x, (torch.sin(x[:, :1] + shift) + x[:, 1:2] * 0.7 - shift * x[:, 2:3])


def fit(model, params, shift, steps, lr, gen):
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for _ in range(steps):
        x, y = task(shift, 64, gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(82)
    gen = torch.Generator().manual_seed(82)
    model = net()
    base = fit(model, model.parameters(), 0.0, 120, 5e-3, gen)
    print(f"pretrained to {base[-1]:.4f}")
    model.requires_grad_(False)
    for i in (0, 2, 4):
        model[i] = LoRALinear(model[i])
    adapters = [p for p in model.parameters() if p.requires_grad]
    log = fit(model, adapters, 1.0, 150, 5e-3, gen)
    print(f"loss {sum(log[:5]) / 5:.4f} -> {sum(log[-5:]) / 5:.4f}")
