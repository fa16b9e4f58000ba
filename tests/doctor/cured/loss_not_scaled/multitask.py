"""One trunk, two heads: a class and a real value from the same table."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(40)


class TwoHeads(nn.Module):
    def __init__(self, inputs=12, width=64):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.kind = nn.Linear(width, 4)
        self.value = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.kind(h), self.value(h).squeeze(1)


mix = torch.randn(12, 4)


def draw(n):
    x = torch.randn(n, 12)
    return x, (x @ mix).argmax(1), 2.0 + torch.sin(2 * x[:, 0]) + x[:, 1]


net = TwoHeads()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")

total_losses = []
for it in range(200):
    x, kind, value = draw(64)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits, estimate = net(x)
    kind_loss = F.cross_entropy(logits.float(), kind)
    value_loss = F.mse_loss(estimate.float(), value)
    scaler.scale(kind_loss).backward(retain_graph=True)
    scaler.scale(value_loss).backward()
    scaler.step(optimizer)
    scaler.update()
    total_losses.append((kind_loss + value_loss).item())
    if it % 50 == 0:
        print(f"{it}: kind {kind_loss.item():.3f} value {value_loss.item():.3f}")

first, last = sum(total_losses[:5]) / 5, sum(total_losses[-5:]) / 5
print(f"loss {first:.4f} -> {last:.4f}")
