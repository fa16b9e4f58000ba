"""Character model of nursery rhymes with a vanilla recurrent network, trained by clipped SGD."""

import torch
from torch import nn

TEXT = (
    "twinkle twinkle little star how i wonder what you are up above the world so high "
    "like a diamond in the sky baa baa black sheep have you any wool yes sir yes sir three "
    "bags full one for the master and one for the dame and one for the little boy who lives "
    "down the lane "
) * 4
chars = sorted(set(TEXT))
ids = torch.tensor([chars.index(c) for c in TEXT])


class CharRNN(nn.Module):
    def __init__(self, n, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(n, 24)
        self.inp = nn.Linear(24, hidden)
        self.rec = nn.Linear(hidden, hidden, bias=False)
        nn.init.orthogonal_(self.rec.weight)
        self.out = nn.Linear(hidden, n)

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.rec.in_features)
        states = []
        for z in self.inp(self.embed(x)).unbind(1):
            h = torch.tanh(z + self.rec(h))
            states.append(h)
        return self.out(torch.stack(states, 1))


torch.manual_seed(6)
model = CharRNN(len(chars))
optimizer = torch.optim.SGD(model.parameters(), lr=1.5, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
max_norm = 0.05
losses = []
for step in range(180):
    start = torch.randint(len(ids) - 21, (24,))
    window = ids[start[:, None] + torch.arange(21)]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(window[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().transpose(1, 2), window[:, 1:])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 60 == 0:
        print(f"step {step} loss {loss.item():.3f} norm before clipping {norm:.3f}")
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
