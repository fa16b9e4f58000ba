"""Predict plant height from soil, light and water on a small table, keeping the best weights."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def greenhouse(n=120, seed=92):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g)
    height = 2 * x[:, 0] * x[:, 1] + torch.sqrt(x[:, 2] + 0.1) - 0.5 * x[:, 3]
    return TensorDataset(x, (height + 0.05 * torch.randn(n, generator=g)).unsqueeze(1))


class Trainer:
    def __init__(self, model, loader, lr):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.losses, self.best, self.best_state = [], float("inf"), None

    def epoch(self):
        total, batches = 0.0, 0
        for x, y in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                pred = self.model(x)
            loss = nn.functional.mse_loss(pred.float(), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total, batches = total + loss.item(), batches + 1
        self.losses.append(total / max(batches, 1))
        if self.losses[-1] < self.best:
            self.best, self.best_state = self.losses[-1], copy.deepcopy(self.model.state_dict())


def main(batch_size=30, epochs=60):
    torch.manual_seed(92)
    loader = DataLoader(greenhouse(), batch_size=batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    model.append(nn.Linear(32, 1))
    trainer = Trainer(model, loader, lr=3e-3)
    for _ in range(epochs):
        trainer.epoch()
    model.load_state_dict(trainer.best_state)
    v = trainer.losses
    print(f"loss {sum(v[:3]) / 3:.4f} -> {sum(v[-3:]) / 3:.4f}")


if __name__ == "__main__":
    main()
