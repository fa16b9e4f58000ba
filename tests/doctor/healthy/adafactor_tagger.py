"""Part-of-speech-like tags from a convolution over words, optimised by Adafactor."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WORDS, TAGS = 300, 6


class ConvTagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        self.context = nn.Conv1d(dim, dim, kernel_size=3, padding=1)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, TAGS)

    def forward(self, words):
        x = self.embed(words)
        x = x + F.relu(self.context(x.transpose(1, 2)).transpose(1, 2))
        return self.out(self.norm(x))


def sentences(lexicon, n=32, length=14):
    words = torch.randint(WORDS, (n, length))
    tags = lexicon[words]
    after_verb = torch.zeros_like(tags, dtype=torch.bool)
    after_verb[:, 1:] = tags[:, :-1] == 0
    return words, torch.where(after_verb & (tags == 1), 2, tags)


def main():
    torch.manual_seed(44)
    lexicon = torch.randint(TAGS, (WORDS,))
    model = ConvTagger()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for _ in range(160):
        words, tags = sentences(lexicon)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model(words)
        loss = F.cross_entropy(scores.float().transpose(1, 2), tags)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
