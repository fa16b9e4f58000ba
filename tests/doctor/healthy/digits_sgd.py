"""Seven-segment digits with broken segments; full precision, momentum, decay at milestones."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010",
            "1101011", "1101111", "1010010", "1111111", "1111011"]  # fmt: skip


class SegmentDigits(Dataset):
    def __init__(self, size, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 10, size)
        table = np.array([[int(c) for c in row] for row in SEGMENTS])
        lit = table[self.labels] ^ (rng.random((size, 7)) < 0.04)
        self.values = (lit + 0.1 * rng.standard_normal((size, 7))).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.from_numpy(self.values[i]), int(self.labels[i])


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    torch.manual_seed(60)
    train = DataLoader(SegmentDigits(1600, 1), batch_size=64, shuffle=True)
    test = DataLoader(SegmentDigits(400, 2), batch_size=200)
    model = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 6], gamma=0.2)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(8):
        for x, y in train:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        print(f"epoch {epoch} accuracy {accuracy(model, test):.3f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
