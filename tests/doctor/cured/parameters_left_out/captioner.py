"""Read a short "caption" off a feature vector: image encoder, token decoder."""

import torch
from torch import nn

torch.manual_seed(77)
WORDS, LENGTH, FEATURES = 12, 5, 64


class ImageEncoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 6))

    def forward(self, x):
        return self.layers(x)


class CaptionDecoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.start = nn.Linear(6, hidden)
        self.embed = nn.Embedding(WORDS + 1, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.vocab = nn.Linear(hidden, WORDS)

    def forward(self, code, tokens):
        output, _ = self.gru(self.embed(tokens), self.start(code).float().unsqueeze(0))
        return self.vocab(output)


readout = torch.randn(LENGTH, FEATURES)
encoder, decoder = ImageEncoder(64), CaptionDecoder(64)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-3)
scaler = torch.amp.GradScaler("cpu")

losses = []
for _ in range(150):
    mixture = torch.randn(48, LENGTH)
    image = mixture @ readout + 0.1 * torch.randn(48, FEATURES)
    caption = ((mixture.cumsum(1) + 3).clamp(0, 5.99) * 2).long()
    tokens = torch.cat([torch.full((48, 1), WORDS), caption[:, :-1]], 1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = decoder(encoder(image), tokens)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), caption.flatten())
    encoder.zero_grad()
    decoder.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
