"""Texture classification with a small residual CNN, trained from scratch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Gratings(Dataset):
    """Sine gratings of four orientations and a random phase, buried in noise."""

    def __init__(self, n=640, size=12, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(4, (n,), generator=g)
        phase = torch.rand(n, 1, 1, generator=g) * 6.283
        angle = self.y.view(-1, 1, 1) * 3.1416 / 4
        r = torch.arange(size, dtype=torch.float32)
        wave = torch.cos(angle) * r.view(1, 1, -1) + torch.sin(angle) * r.view(1, -1, 1)
        self.x = torch.sin(1.6 * wave + phase) + 1.5 * torch.randn(n, size, size, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i][None], self.y[i]


class TextureNet(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, ch, 5, padding=2), nn.BatchNorm2d(ch), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU())
        self.fc = nn.Linear(ch, 4)

    def features(self, x):
        return self.stem(x)

    def forward(self, x):
        x = self.features(x)
        x = x + self.block(x)
        return self.fc(x.mean((2, 3)))


torch.manual_seed(2)
loader = DataLoader(Gratings(), batch_size=32, shuffle=True)
model = TextureNet()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
losses = []
for _ in range(5):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    sched.step()
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
