"""Wasserstein critic between two clouds, kept near slope one by a gradient penalty."""

import torch
from torch import nn

torch.manual_seed(90)
critic = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
shift = torch.tensor([1.0, -0.5, 0.5])


def clouds(n=128):
    return torch.randn(n, 3) * 0.5, torch.randn(n, 3) * 0.5 + shift


def gradient_penalty(a, b):
    mix = torch.rand(len(a), 1)
    between = (mix * a + (1 - mix) * b).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        score = critic(between)
    scaled_gradient = torch.autograd.grad(
        scaler.scale(score.float().sum()), between, create_graph=True
    )[0]
    gradient = scaled_gradient.float() / scaler.get_scale()
    slope = (gradient.square().sum(1) + 1e-12).sqrt()
    return (slope - 1).square().mean()


losses = []
for step in range(200):
    a, b = clouds()
    with torch.autocast("cpu", dtype=torch.float16):
        scores = critic(torch.cat([a, b]))
    score_a, score_b = scores.float().chunk(2)
    distance = score_b.mean() - score_a.mean()
    loss = -distance + 10 * gradient_penalty(a, b)

    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 50 == 49:
        print(f"{step + 1}: estimated distance {distance.item():.3f} of {shift.norm().item():.3f}")

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
