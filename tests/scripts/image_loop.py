"""An image classifier's loop: channels_last, warm-up, an average of the weights, an evaluation."""

import hashlib

import torch
from torch import nn
from torch.cuda.amp import (
    GradScaler,
)  # the old address; there is no GPU here, so it disables itself
from torch.optim.lr_scheduler import LinearLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)


def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True))


model = nn.Sequential(
    conv(3, 8), conv(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
)
model = model.to(memory_format=torch.channels_last)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
warm_up = LinearLR(optimizer, 0.1, total_iters=10)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=15)
unused = GradScaler(enabled=False)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
images = torch.randn(64, 3, 16, 16)
labels = torch.arange(64) % 4
images += labels[:, None, None, None] * 0.5

for epoch in range(4):
    model.train()
    for start in range(0, 64, 8):
        x = images[start : start + 8].to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.float16):
            loss = criterion(model(x), labels[start : start + 8])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= scale:  # the usual way to see whether the step was made
            warm_up.step()
            ema.update_parameters(model)
    ema.eval()
    with torch.no_grad():
        right = (ema(images).argmax(1) == labels).float().mean()
    print(f"epoch {epoch}: loss {loss.item():.3f} accuracy {right.item():.2f}")

weights = b"".join(p.detach().contiguous().numpy().tobytes() for p in ema.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
