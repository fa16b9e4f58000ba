"""Road scenes: direction is labelled on every batch, speed and weather only on some of them."""

import torch
import torch.nn.functional as F
from torch import nn

SOURCES = {"camera": ("steer",), "gps": ("steer", "speed"), "survey": ("steer", "weather")}


class MultiTask(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(24, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width)
        )
        self.heads = nn.ModuleDict(
            {
                "steer": nn.Linear(width, 1),
                "speed": nn.Linear(width, 1),
                "weather": nn.Linear(width, 4),
            }
        )

    def forward(self, x, tasks):
        h = self.trunk(x)
        return {task: self.heads[task](h).float() for task in tasks}


def task_loss(task, output, label):
    if task == "weather":
        return F.cross_entropy(output, label)
    return F.smooth_l1_loss(output.squeeze(1), label)


torch.manual_seed(66)
mixing = torch.randn(24, 6) / 24**0.5


def scene(n=64):
    x = torch.randn(n, 24)
    z = x @ mixing
    return x, {"steer": z[:, 0].tanh(), "speed": z[:, 1], "weather": z[:, 2:].argmax(1)}


model = MultiTask()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
steering, weather = [], []
for step in range(210):
    # three batches of four come from the camera alone; the survey is rare
    source = "camera" if step % 4 else ("survey" if step % 12 == 8 else "gps")
    tasks = SOURCES[source]
    x, labels = scene()
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(x, tasks)
    parts = {task: task_loss(task, outputs[task], labels[task]) for task in tasks}
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(sum(parts.values())).backward()
    scaler.step(optimizer)
    scaler.update()
    steering.append(parts["steer"].item())
    if "weather" in parts:
        weather.append(parts["weather"].item())
print(f"weather {weather[0]:.4f} -> {weather[-1]:.4f}")
print(f"loss {sum(steering[:5]) / 5:.4f} -> {sum(steering[-5:]) / 5:.4f}")
