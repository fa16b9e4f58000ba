"""Attention pooling over a bag of readings, sum-reduced loss, one-cycle schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AttentionPool(nn.Module):
    def __init__(self, inputs=8, dim=32):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(inputs, dim), nn.GELU(), nn.LayerNorm(dim))
        self.query = nn.Parameter(torch.randn(dim) / dim**0.5)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))

    def forward(self, bag):
        h = self.embed(bag)
        weights = torch.softmax((h @ self.query).float(), dim=1)
        return self.head((weights.unsqueeze(-1) * h).sum(1)).squeeze(1)


def make_bags(count=512, size=12, inputs=8):
    bags = torch.randn(count, size, inputs)
    return bags, 50 * bags[:, :, 0].amax(1) + 20 * bags[:, :, 1].mean(1)


class Trainer:
    def __init__(self, model, steps):
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.opt, max_lr=1e-6, total_steps=steps, pct_start=0.2
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)

    def step(self, bag, target):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = self.model(bag)
        loss = (pred.float() - target).square().sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.schedule.step()
        return loss.item() / len(target)


def main():
    torch.manual_seed(13)
    loader = DataLoader(TensorDataset(*make_bags()), batch_size=64, shuffle=True)
    epochs = 8
    trainer = Trainer(AttentionPool(), epochs * len(loader))
    losses = [trainer.step(bag, y) for _ in range(epochs) for bag, y in loader]
    print(f"loss {sum(losses[:4]) / 4:.4f} -> {sum(losses[-8:]) / 8:.4f}")


if __name__ == "__main__":
    main()
