"""A small residual network sorts noisy textures into six classes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(Block(8, 12, 2), Block(12, 24, 2))
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def textures(count, classes=6):
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    labels = torch.randint(classes, (count,))
    angle = labels[:, None, None] * torch.pi / classes
    wave = torch.sin(xx * torch.cos(angle) + yy * torch.sin(angle))
    return wave[:, None] + 0.7 * torch.randn(count, 3, 12, 12), labels


def train(epochs=5):
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(*textures(384)), batch_size=32, shuffle=True)
    net = ResNet(6)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[4], gamma=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    history = []
    for _ in range(epochs):
        for images, labels in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = net(images)
            loss = F.cross_entropy(logits.float(), labels)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            history.append(loss.item())
        sched.step()
    return history


if __name__ == "__main__":
    losses = train()
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"loss {first:.4f} -> {last:.4f}")
