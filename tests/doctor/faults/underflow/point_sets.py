"""Tell four solids apart from point clouds measured in micrometres (deep sets)."""

import torch
from torch import nn


def clouds(batch, points, gen):
    """Points on ellipsoids, with five channels of no use; the class is the ratio of the axes."""
    axes = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.6, 0.6], [1.0, 1.0, 0.5], [1.0, 0.7, 0.4]])
    label = torch.randint(4, (batch,), generator=gen)
    v = torch.randn(batch, points, 3, generator=gen)
    v = v / v.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    v = v * axes[label][:, None] + 0.03 * torch.randn(batch, points, 3, generator=gen)
    junk = torch.randn(batch, points, 5, generator=gen)
    return torch.cat([v, junk], dim=-1) * 10_000.0, label


class DeepSet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.lift = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.point = nn.Linear(width, width)
        self.classify = nn.Linear(width, 4)

    def forward(self, x):
        h = torch.relu(self.norm(self.lift(x).float()))
        h = torch.relu(self.point(h)).float().mean(dim=1)
        return self.classify(h)


def main():
    torch.manual_seed(8)
    gen = torch.Generator().manual_seed(8)
    model = DeepSet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    losses, accumulate = [], 4
    for step in range(80):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x, y = clouds(64, 64, gen)
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            loss = nn.functional.cross_entropy(logits.float(), y)
            scaler.scale(loss / accumulate).backward()
            losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 19:
            print(f"step {step + 1}: {sum(losses[-10:]) / 10:.4f}")
    print(f"loss {sum(losses[:10]) / 10:.4f} -> {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
