"""Sum of marked numbers in a sequence (the adding problem) with a GRU."""

import torch
from torch import nn

LOSS_SCALE = 2.0**24


def adding(batch, length, gen):
    values = torch.rand(batch, length, generator=gen)
    marks = torch.zeros(batch, length)
    for row in marks:
        row[torch.randperm(length, generator=gen)[:2]] = 1.0
    return torch.stack([values, marks], dim=-1), (values * marks).sum(1)


class Adder(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.inp = nn.Linear(2, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        h, _ = self.gru(self.inp(x))
        return self.out(h[:, -1]).squeeze(-1)


def main():
    torch.manual_seed(60)
    gen = torch.Generator().manual_seed(60)
    model = Adder()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
    losses = []
    for step in range(140):
        x, y = adding(32, 8, gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            pred = model(x)
        loss = nn.functional.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update(LOSS_SCALE)
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"{step:3d} {losses[-1]:.4f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
