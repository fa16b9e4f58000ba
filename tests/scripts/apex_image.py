"""Image classification with apex: a small residual net on 8x8 digits, one loss, a schedule.

Written as users of apex write it; run by `gradlift run --apex`.
"""

import argparse

import torch
from apex import amp
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--keep-batchnorm-fp32", default=None)
parser.add_argument("--loss-scale", default=None)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self, channels=8, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.body = nn.Sequential(Block(channels), nn.MaxPool2d(2), Block(channels))
        self.head = nn.Linear(channels * 4, classes)

    def forward(self, x):
        return self.head(self.body(torch.relu(self.stem(x))).flatten(1))


def batches(images, labels, size=64):
    order = torch.randperm(len(images))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]


torch.manual_seed(args.seed)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1408), slice(1408, None)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
model, optimizer = amp.initialize(
    model,
    optimizer,
    opt_level=args.opt_level,
    keep_batchnorm_fp32=args.keep_batchnorm_fp32,
    loss_scale=args.loss_scale,
)
criterion = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    model.train()
    total = count = 0
    for image, label in batches(images[train], labels[train]):
        loss = criterion(model(image), label)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        total, count = total + loss.item(), count + 1
    schedule.step()
    print(f"epoch {epoch} loss {total / count:.4f}")

model.eval()
with torch.no_grad():
    right = model(images[test]).argmax(1) == labels[test]
print(f"loss {total / count:.4f}")
print(f"accuracy {right.float().mean():.4f}")
