"""Matrix factorisation of movie ratings with user and item biases."""

import torch
from torch import nn

torch.manual_seed(38)
USERS, ITEMS, RANK = 120, 90, 6
true_u, true_i = torch.randn(USERS, RANK), torch.randn(ITEMS, RANK)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, 16)
        self.items = nn.Embedding(ITEMS, 16)
        self.mix = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.items.weight, std=0.3)

    def forward(self, u, i):
        return (self.mix(self.users(u)).float() * self.items(i)).sum(1) + self.bias


def batches(steps, size):
    for _ in range(steps):
        u = torch.randint(USERS, (size,))
        i = torch.randint(ITEMS, (size,))
        yield u, i, (true_u[u] * true_i[i]).sum(1) / 2 + 0.1 * torch.randn(size)


model = Factors()
opt = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=0.3)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.995)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
mse = []
for u, i, r in batches(300, 256):
    with torch.autocast("cpu", torch.float16):
        guess = model(u, i)
    loss = nn.functional.mse_loss(guess, r)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= scale:
        schedule.step()
    mse.append(loss.item())
print(f"loss {sum(mse[:5]) / 5:.4f} -> {sum(mse[-5:]) / 5:.4f}")
