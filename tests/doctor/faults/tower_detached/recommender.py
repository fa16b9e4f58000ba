"""Two-tower retrieval: users and items meet in a dot product, negatives come from the batch."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Tower(nn.Module):
    def __init__(self, count, features, dim=16):
        super().__init__()
        self.ids = nn.Embedding(count, dim)
        self.mlp = nn.Sequential(nn.Linear(dim + features, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, ids, features):
        return self.mlp(torch.cat([self.ids(ids), features], dim=1))


class TwoTower(nn.Module):
    def __init__(self, users, items):
        super().__init__()
        self.user = Tower(users, 4)
        self.item = Tower(items, 6)

    def encode_items(self, ids, features):
        with torch.no_grad():
            return self.item(ids, features)

    def forward(self, user, item):
        u = self.user(*user).float()
        i = self.encode_items(*item).float()
        return u @ i.T


def interactions(n=2400, users=80, items=60):
    taste, style = torch.randn(users, 5), torch.randn(items, 5)
    u = torch.randint(users, (n,))
    i = torch.distributions.Categorical(logits=3 * taste[u] @ style.T).sample()
    uf = taste @ torch.randn(5, 4) + 0.5 * torch.randn(users, 4)
    jf = style @ torch.randn(5, 6) + 0.5 * torch.randn(items, 6)
    return TensorDataset(u, uf[u], i, jf[i])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--batch", default=48, type=int)
    args = parser.parse_args()
    torch.manual_seed(58)
    loader = DataLoader(interactions(), args.batch, shuffle=True, drop_last=True)
    model = TwoTower(80, 60)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for epoch in range(args.epochs):
        for u, uf, i, jf in loader:
            with torch.autocast("cpu", torch.bfloat16):
                scores = model((u, uf), (i, jf))
            same = (i[:, None] == i[None]) & ~torch.eye(len(i), dtype=torch.bool)
            loss = F.cross_entropy(scores.masked_fill(same, -1e4), torch.arange(len(u)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: {sum(losses[-50:]) / 50:.4f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
