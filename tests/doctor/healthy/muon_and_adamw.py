"""Modular addition by a small network: matrices and the other parameters have an optimizer each."""

import torch
from torch import nn

P = 23


class Adder(nn.Module):
    def __init__(self, dim=48, width=96):
        super().__init__()
        self.embed = nn.Embedding(P, dim)
        self.norm = nn.LayerNorm(2 * dim)
        self.fc1 = nn.Linear(2 * dim, width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, P)

    def forward(self, pairs):
        x = self.norm(self.embed(pairs).flatten(1))
        x = torch.relu(self.fc1(x))
        return self.head(x + torch.relu(self.fc2(x)))


def split_parameters(model):
    matrices = [model.fc1.weight, model.fc2.weight]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def main():
    torch.manual_seed(15)
    model = Adder()
    matrices, others = split_parameters(model)
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, ns_steps=3),
        torch.optim.AdamW(others, lr=4e-3),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    losses = []
    for _ in range(150):
        pairs = torch.randint(P, (128, 2))
        target = pairs.sum(1) % P
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(pairs)
        loss = nn.functional.cross_entropy(logits.float(), target)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
