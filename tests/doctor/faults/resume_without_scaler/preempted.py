"""House-price regression in a job that is restarted every 40 steps from its last checkpoint."""

import tempfile
from pathlib import Path

import torch
from torch import nn

STEPS_PER_JOB, JOBS = 40, 5


def sales(n, gen):
    x = torch.rand(n, 6, generator=gen)
    price = 100 + 400 * x[:, 0] * x[:, 1] + 150 * x[:, 2] + 10 * torch.randn(n, generator=gen)
    return x, price


def build():
    model = nn.Sequential(
        nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    return (
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        torch.amp.GradScaler("cpu", init_scale=2.0**12),
    )


def job(number, path):
    torch.manual_seed(50)
    gen = torch.Generator().manual_seed(1000 + number)
    model, optimizer, scaler = build()
    start = 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    losses = []
    for _ in range(start, start + STEPS_PER_JOB):
        x, price = sales(64, gen)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            estimate = model(x).squeeze(1)
        loss = nn.functional.mse_loss(estimate.float(), price)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": start + STEPS_PER_JOB,
    }
    torch.save(state, path)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        history = []
        for number in range(JOBS):
            history += job(number, Path(folder) / "last.pt")
    print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")
