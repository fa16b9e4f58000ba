"""Classify EEG-like windows; each channel is z-scored inside the network."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def windows(n=640, channels=6, length=48):
    t = torch.arange(length) / length
    y = torch.randint(3, (n,))
    rate = torch.tensor([3.0, 6.0, 10.0])[y].view(-1, 1, 1)
    phase = torch.rand(n, channels, 1) * 6.28
    x = torch.sin(6.28 * rate * t + phase) + 0.8 * torch.randn(n, channels, length)
    x[:, -1] = 0.0  # the reference electrode
    return TensorDataset(x, y)


class WindowNet(nn.Module):
    def __init__(self, channels=6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1))
        self.conv = nn.Conv1d(channels, 16, 7, padding=3)
        self.head = nn.Linear(16, 3)

    def zscore(self, x):
        x = x * self.gain
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.var(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        h = F.relu(self.conv(self.zscore(x)))
        return self.head(h.mean(-1))


def minimum_scale(scaler, floor=1.0):
    scaler.update()
    if scaler.get_scale() < floor:
        scaler.update(floor)


torch.manual_seed(50)
loader = DataLoader(windows(), batch_size=32, shuffle=True)
model = WindowNet()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
ce = []
for _ in range(6):
    for x, y in loader:
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        minimum_scale(scaler)
        ce.append(loss.item())
print(f"loss {sum(ce[:5]) / 5:.4f} -> {sum(ce[-5:]) / 5:.4f}")
