"""A small transformer that learns to copy the token before, with warm-up and a cosine."""

import math

import torch
from torch import nn

torch.manual_seed(0)
TOKENS, WIDTH, LENGTH, STEPS = 32, 32, 16, 60


class Copier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.tokens(x) + self.positions.weight
        return self.head(self.layers(x, mask=mask, is_causal=True))


def cosine(step):
    return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


model = Copier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
scaler = torch.amp.GradScaler("cpu")

for _ in range(STEPS):
    x = torch.randint(TOKENS, (16, LENGTH))
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits[:, 1:].float().flatten(0, 1), x[:, :-1].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
