"""Does a variable-length walk end to the right of its start? GRU over packed sequences."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.optim.lr_scheduler import OneCycleLR

STEPS = 110


class WalkNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.gru = nn.GRU(2, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, packed):
        _, last = self.gru(packed)
        return self.head(last[0]).squeeze(1)


def walks(n=40):
    sequences, labels = [], []
    for length in torch.randint(3, 13, (n,)).tolist():
        moves = torch.randn(length, 2)
        sequences.append(moves)
        labels.append(float(moves[:, 0].sum() > 0))
    return pack_sequence(sequences, enforce_sorted=False), torch.tensor(labels)


torch.manual_seed(61)
model = WalkNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS, pct_start=0.2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []
for _ in range(STEPS):
    packed, label = walks()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(packed)
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), label)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if before <= scaler.get_scale():
        scheduler.step()
    losses.append(loss.item())
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
