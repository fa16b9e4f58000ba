"""Four micro-batches a step, a schedule by the epoch."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
truth = torch.randn(16, 4)

for _ in range(3):
    for _ in range(20):
        optimizer.zero_grad()
        for _ in range(4):
            x = torch.randn(32, 16)
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            loss = nn.functional.cross_entropy(logits.float(), (x @ truth).argmax(1))
            scaler.scale(loss / 4).backward()
        scaler.step(optimizer)
        scaler.update()
    schedule.step()
