"""Character model: predict the next letter of a synthetic grammar with a small transformer."""

import torch
import torch.nn.functional as F
from torch import nn

VOWELS, CONSONANTS = "aeiou", "bdgklmnprst"
ALPHABET = " " + VOWELS + CONSONANTS


def corpus(words, seed):
    g = torch.Generator().manual_seed(seed)
    text = []
    for _ in range(words):
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            text.append(CONSONANTS[int(torch.randint(11, (1,), generator=g))])
            text.append(VOWELS[int(torch.randint(5, (1,), generator=g))])
        text.append(" ")
    return torch.tensor([ALPHABET.index(c) for c in text])


class CharLM(nn.Module):
    def __init__(self, width=32, context=32):
        super().__init__()
        self.tok = nn.Embedding(len(ALPHABET), width)
        self.pos = nn.Parameter(torch.zeros(context, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, len(ALPHABET))
        mask = torch.triu(torch.ones(context, context, dtype=torch.bool), 1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids):
        n = ids.shape[1]
        x = self.tok(ids) + self.pos[:n]
        return self.out(self.block(x, src_mask=self.mask[:n, :n]))


def main():
    torch.manual_seed(12)
    data = corpus(3000, seed=12)
    model = CharLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    history = []
    for _ in range(120):
        start = torch.randint(len(data) - 33, (16,))
        ids = torch.stack([data[s : s + 33] for s in start.tolist()])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(loss.item())
    print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
