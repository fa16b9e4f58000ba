"""Wine-like tabular classification behind a small trainer class with callbacks."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, optimizer, *, amp=True, callbacks: list[Callable] | None = None):
        self.model, self.optimizer = model, optimizer
        self.amp = amp
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=amp)
        self.callbacks = callbacks or []
        self.step_number = 0

    def forward_loss(self, batch):
        x, y = batch
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.amp):
            logits = self.model(x)
        return nn.functional.cross_entropy(logits.float(), y, label_smoothing=0.05)

    def training_step(self, batch):
        self.optimizer.zero_grad()
        loss = self.forward_loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step_number += 1
        for callback in self.callbacks:
            callback(self, loss.item())

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        value = sum(self.forward_loss(b).item() * len(b[0]) for b in loader)
        self.model.train()
        return value / len(loader.dataset)

    def fit(self, train, valid, epochs):
        for epoch in range(epochs):
            for batch in train:
                self.training_step(batch)
            print(f"epoch {epoch} valid {self.validate(valid):.4f}")


class History:
    def __init__(self):
        self.values = []

    def __call__(self, trainer, loss):
        self.values.append(loss)


def table(n, centers, spread=1.3):
    y = torch.randint(len(centers), (n,))
    x = centers[y] + spread * torch.randn(n, centers.shape[1])
    return TensorDataset(x * torch.logspace(-1, 1, centers.shape[1]), y)


torch.manual_seed(52)
centers = torch.randn(3, 13)
train = DataLoader(table(1010, centers), batch_size=48, shuffle=True, drop_last=True)
valid = DataLoader(table(300, centers), batch_size=100)
model = nn.Sequential(
    nn.BatchNorm1d(13), nn.Linear(13, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)
)
history = History()
trainer = Trainer(model, torch.optim.NAdam(model.parameters(), lr=2e-3), callbacks=[history])
trainer.fit(train, valid, epochs=6)
h = history.values
print(f"loss {sum(h[:5]) / 5:.4f} -> {sum(h[-5:]) / 5:.4f}")
