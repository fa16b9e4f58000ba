"""Fit positive reaction rates with a net whose activation is a hand-written softplus."""

import torch
from torch import nn


class SoftplusFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 8, x, torch.log1p(torch.exp(x.clamp(max=8))))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


class Softplus(nn.Module):
    def forward(self, x):
        return SoftplusFunction.apply(x)


class Rates(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 48), Softplus(), nn.Linear(48, 48), Softplus(), nn.Linear(48, 1)
        )

    def forward(self, x):
        return self.net(x)


def experiments(n, gen):
    x = torch.randn(n, 6, generator=gen)
    x[:, 0] = 10 * torch.rand(n, generator=gen)
    rate = 0.3 * x[:, 0] + torch.relu(x[:, 1]) * 0.8 + 0.2 * x[:, 2] * x[:, 3]
    return x, rate.unsqueeze(1)


def main():
    torch.manual_seed(64)
    gen = torch.Generator().manual_seed(64)
    model = Rates()
    nn.init.uniform_(model.net[0].weight, -1.2, 1.2)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for step in range(200):
        x, y = experiments(64, gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            pred = model(x)
        loss = nn.functional.smooth_l1_loss(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
        if step % 50 == 0:
            print(step, f"{losses[-1]:.4f}", scaler.get_scale())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
