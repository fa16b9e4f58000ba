"""A recurrent net gets a key as its initial state, listens to noise, and must name the key."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(11)
KEYS, HIDDEN, STEPS, BATCH = 8, 32, 40, 64


class Recall(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(KEYS, HIDDEN)
        self.cell = nn.RNNCell(4, HIDDEN)
        self.readout = nn.Linear(HIDDEN, KEYS)
        nn.init.normal_(self.cell.weight_ih, std=0.05)
        nn.init.orthogonal_(self.cell.weight_hh)

    def forward(self, key, noise):
        h = torch.tanh(self.key(key))
        for t in range(noise.shape[1]):
            h = self.cell(noise[:, t], h)
        return self.readout(h)


net = Recall()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []

for _ in range(150):
    target = torch.randint(KEYS, (BATCH,))
    noise = torch.randn(BATCH, STEPS, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        scores = net(F.one_hot(target, KEYS).float(), noise)
    loss = F.cross_entropy(scores.float(), target)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())

print(f"loss {sum(losses[:10]) / 10:.4f} -> {sum(losses[-10:]) / 10:.4f}")
