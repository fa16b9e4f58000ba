"""Crowd-sourced labels, a third of them guesses; annealed noise is added to the gradients."""

import torch
from torch import nn

GUESSED, CLASSES, STEPS = 0.35, 5, 200
ETA, GAMMA = 1e-4, 0.55


def annotate(n, prototypes):
    truth = torch.randint(CLASSES, (n,))
    x = prototypes[truth] + 0.8 * torch.randn(n, prototypes.shape[1])
    guess = torch.randint(CLASSES, (n,))
    return x, torch.where(torch.rand(n) < GUESSED, guess, truth)


@torch.no_grad()
def add_gradient_noise(parameters, step):
    std = (ETA / (1 + step) ** GAMMA) ** 0.5
    for p in parameters:
        p.grad.add_(std * torch.randn_like(p.grad))


def main():
    torch.manual_seed(48)
    prototypes = torch.randn(CLASSES, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    losses = []
    for step in range(STEPS):
        x, y = annotate(256, prototypes)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model(x)
        loss = nn.functional.cross_entropy(scores.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        add_gradient_noise(model.parameters(), step)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
