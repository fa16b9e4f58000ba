"""Sequence reversal by a transformer; linear warm-up, then inverse square root."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

VOCAB, LENGTH, WARMUP, STEPS = 12, 6, 30, 170


class Reverser(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 96, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(dim), False)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, x):
        return self.out(self.encoder(self.embed(x) + self.position))


def schedule(step):
    if step < WARMUP:
        return step / WARMUP
    return (WARMUP / step) ** 0.5


if __name__ == "__main__":
    torch.manual_seed(12)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, schedule)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(STEPS):
        x = torch.randint(VOCAB, (24, LENGTH))
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = nn.functional.cross_entropy(
            logits.float().transpose(1, 2), x.flip(1), reduction="sum"
        )
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
