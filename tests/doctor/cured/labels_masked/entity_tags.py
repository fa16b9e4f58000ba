"""Tag named entities in chunks of a long text; padding and unlabelled tokens carry -100."""

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -100


def annotated_text(n, gen):
    """Tokens, and tags for the annotated passages only."""
    tokens = torch.randint(50, (n,), generator=gen)
    tags = (tokens // 10 + torch.roll(tokens, 1) % 2) % 5
    annotated = torch.ones(n, dtype=torch.bool)
    for start in range(2600, n - 400, 2600):
        annotated[start : start + 400] = False
    return tokens, torch.where(annotated, tags, IGNORE)


def chunks(tokens, tags, batch, length):
    size = batch * length
    for i in range(0, len(tokens) - size + 1, size):
        yield tokens[i : i + size].view(batch, length), tags[i : i + size].view(batch, length)


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 5)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.out(self.norm(x))


def tag_loss(logits, tags):
    known = (tags != IGNORE).flatten()
    flat = logits.float().flatten(0, 1)
    loss = F.cross_entropy(flat, tags.flatten().clamp_min(0), reduction="none")
    return (loss * known).sum() / known.sum().clamp_min(1)


def main():
    torch.manual_seed(61)
    tokens, tags = annotated_text(20000, torch.Generator().manual_seed(61))
    model = Tagger()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    curve = []
    for ids, gold in chunks(tokens, tags, 8, 20):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss = tag_loss(logits, gold)
        opt.zero_grad()
        loss.backward()
        opt.step()
        curve.append(loss.item())
    print(f"loss {sum(curve[:5]) / 5:.4f} -> {sum(curve[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
