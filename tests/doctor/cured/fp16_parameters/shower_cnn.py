"""Tell two kinds of particle shower apart in a calorimeter image."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(37)


def showers(n):
    kind = torch.randint(2, (n,))
    axis = torch.arange(12.0)
    r, c = 3 + 6 * torch.rand(2, n, 1)
    width = 1 + torch.rand(n, 1)
    rows = torch.exp(-(((axis - r) / width) ** 2))
    cols = torch.exp(-(((axis - c) / (width * (1 + kind[:, None]))) ** 2))
    image = rows[:, :, None] * cols[:, None, :] + 0.1 * torch.randn(n, 12, 12)
    return image[:, None], kind


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 4, stride=2)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc1 = nn.Linear(144, 32)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


net = Net()
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-7)
history = []
for step in range(150):
    images, kind = showers(32)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(images)
    loss = F.cross_entropy(logits.float(), kind)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    history.append(loss.item())
    if step % 50 == 0:
        print(step, round(history[-1], 4))

print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")
