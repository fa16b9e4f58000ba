"""Two-tower recommender: tables and dense layers have their own optimizers."""

import torch
from torch import nn

USERS, ITEMS, DIM = 200, 120, 24


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.Embedding(ITEMS, DIM)
        self.user_mlp = nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, DIM))
        self.item_mlp = nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, DIM))

    def forward(self, user, item):
        return (self.user_mlp(self.users(user)) * self.item_mlp(self.items(item))).sum(-1)


def main(steps=300, batch=64):
    torch.manual_seed(21)
    taste, trait = torch.randn(USERS, 3), torch.randn(ITEMS, 3)
    model = Towers()
    tables = [*model.users.parameters(), *model.items.parameters()]
    dense = [*model.user_mlp.parameters(), *model.item_mlp.parameters()]
    opt_tables = torch.optim.SGD(tables, lr=2.0)
    opt_dense = torch.optim.SGD(dense, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)

    losses = []
    for _ in range(steps):
        user, item = torch.randint(USERS, (batch,)), torch.randint(ITEMS, (batch,))
        rating = torch.tanh((taste[user] * trait[item]).sum(-1))

        opt_tables.zero_grad()
        opt_dense.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            score = model(user, item)
        loss = nn.functional.mse_loss(score.float(), rating)
        scaler.scale(loss).backward()

        scaler.step(opt_tables)
        scaler.update()
        scaler.step(opt_dense)
        scaler.update()
        losses.append(loss.item())

    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(f"loss {first:.4f} -> {last:.4f}")


main()
