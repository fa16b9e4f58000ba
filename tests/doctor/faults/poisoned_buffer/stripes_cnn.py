"""Small CNN on synthetic stripes; batch-norm statistics are recalibrated after every epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    r = torch.arange(12.0)
    wave = torch.sin(r[None] * (0.6 + 0.5 * y[:, None]) + 6 * torch.rand(n, 1, generator=g))
    x = wave[:, None, :, None].expand(n, 1, 12, 12)
    return TensorDataset(x + torch.randn(n, 1, 12, 12, generator=g), y)


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 25, 3),
    )


@torch.no_grad()
def recalibrate(net, loader):
    layers = [m for m in net if isinstance(m, nn.BatchNorm2d)]
    for layer in layers:
        mean, var, count = 0.0, 0.0, 0
        for x, _ in loader:
            h = net[: list(net).index(layer)](x)
            mean, var, count = mean + h.mean((0, 2, 3)), var + h.var((0, 2, 3)), count + 1
        layer.running_mean.copy_(torch.as_tensor(mean) / torch.tensor(count))
        layer.running_var.copy_(torch.as_tensor(var) / torch.tensor(count))


@torch.no_grad()
def evaluate(net, data):
    net.eval()
    x, y = data[:]
    loss = F.cross_entropy(net(x), y).item()
    net.train()
    return loss


torch.manual_seed(53)
train_set, test_set = stripes(640, 1), stripes(200, 2)
loader = DataLoader(train_set, batch_size=32, shuffle=True)
calibration = DataLoader(Subset(train_set, range(96)), batch_size=128, drop_last=True)
net = make_net()
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
scores = [evaluate(net, test_set)]
for _ in range(4):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    recalibrate(net, calibration)
    scores.append(evaluate(net, test_set))
print(f"loss {scores[0]:.4f} -> {scores[-1]:.4f}")
