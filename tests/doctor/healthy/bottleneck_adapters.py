"""Adapters between the layers of a fixed encoder, for a sequence-labelling task."""

import torch
from torch import nn


class Adapter(nn.Module):
    """Down, nonlinearity, up; starts as the identity."""

    def __init__(self, dim, width):
        super().__init__()
        self.down = nn.Linear(dim, width)
        self.up = nn.Linear(width, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


class Tagger(nn.Module):
    def __init__(self, vocabulary=200, dim=48, depth=2, tags=5):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        for part in (self.embed, self.layers):
            part.requires_grad_(False)
        self.adapters = nn.ModuleList(Adapter(dim, 12) for _ in range(depth))
        self.tag = nn.Linear(dim, tags)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer, adapter in zip(self.layers, self.adapters):
            x = adapter(layer(x))
        return self.tag(x)


torch.manual_seed(21)
tag_of = torch.randint(5, (200,))
model = Tagger()
trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
total = sum(p.numel() for p in model.parameters())
print(f"training {sum(p.numel() for p in trainable.values())} of {total} parameters")

optimizer = torch.optim.AdamW(trainable.values(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
losses = []
for _ in range(140):
    tokens = torch.randint(200, (16, 16))
    previous = torch.roll(tokens, 1, dims=1)
    target = torch.where(tokens % 7 == 0, tag_of[previous], tag_of[tokens])
    with torch.autocast("cpu", torch.float16):
        scores = model(tokens)
    loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), target.flatten())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
