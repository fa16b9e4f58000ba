"""Energy use of buildings from weather and occupancy: mean and spread are both predicted."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Heteroscedastic(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.mean = nn.Linear(64, 1)
        self.log_var = nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.mean(h).float(), self.log_var(h).float().clamp(-6, 6)


def buildings(n=2000):
    x = torch.randn(n, 8)
    level = x[:, :1] * 0.8 + torch.relu(x[:, 1:2]) - 0.3 * x[:, 2:3] * x[:, 3:4]
    return TensorDataset(x, level + 0.2 * torch.rand(n, 1) * torch.randn(n, 1))


torch.manual_seed(40)
train_set, val_set = random_split(buildings(), [1600, 400])
model = Heteroscedastic(8)
nll = nn.GaussianNLLLoss(eps=1e-4)
optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_factor=4.0, growth_interval=2)

losses = []
for epoch in range(4):
    model.train()
    for x, y in DataLoader(train_set, batch_size=40, shuffle=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            mean, log_var = model(x)
        loss = nll(mean, y, log_var.exp())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        x, y = val_set[:]
        mean, _ = model(x)
        print(f"epoch {epoch}: validation mse {(mean - y).square().mean().item():.4f}")

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
