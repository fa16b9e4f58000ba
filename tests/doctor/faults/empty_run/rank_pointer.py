"""Sort short sequences: a transformer points at the rank of every element."""

import torch
import torch.nn.functional as F
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Ranker(nn.Module):
    def __init__(self, length=6, width=32):
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, length)

    def forward(self, x):
        return self.out(self.encoder(self.lift(x)))


def sequences(n, length=6):
    x = torch.rand(n, length, device=device)
    return x.unsqueeze(-1), x.argsort(1).argsort(1)


def train_step(model, optimizer, scaler, x, ranks):
    with torch.autocast(device.type, torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ranks.flatten())
    if scaler.is_enabled():
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def main():
    torch.manual_seed(79)
    model = Ranker().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler(device.type, enabled=torch.cuda.is_available())
    losses = []
    for step in range(150):
        losses.append(train_step(model, optimizer, scaler, *sequences(32)))
        if step % 50 == 0:
            print(f"step {step}: {losses[-1]:.4f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
