"""A convolutional net with batch norm, whose convolutions have a bias they do not need."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
patterns = torch.randn(4, 1, 12, 12)

for _ in range(60):
    y = torch.randint(4, (32,))
    x = patterns[y] + 0.5 * torch.randn(32, 1, 12, 12)
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
