"""Implicit-feedback recommender: dot products of user and item vectors, sampled negatives."""

import argparse

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--users", type=int, default=5000)
parser.add_argument("--items", type=int, default=100_000)
parser.add_argument("--popular", type=int, default=300, help="items that are in stock")
parser.add_argument("--dim", type=int, default=16)
parser.add_argument("--steps", type=int, default=250)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--lr", type=float, default=0.03)
args = parser.parse_args()

torch.manual_seed(3)
users = torch.nn.Embedding(args.users, args.dim, sparse=True)
items = torch.nn.Embedding(args.items, args.dim, sparse=True)
torch.nn.init.normal_(users.weight, std=0.1)
torch.nn.init.normal_(items.weight, std=0.1)
optim = torch.optim.SparseAdam([*users.parameters(), *items.parameters()], lr=args.lr)

# a user of group g buys items of group g
GROUPS = 6
stock = torch.randperm(args.items)[: args.popular]
by_group = [stock[g::GROUPS] for g in range(GROUPS)]
active = torch.randperm(args.users)[:200]

losses = []
for _ in range(args.steps):
    who = torch.randint(len(active), (args.batch,))
    user = active[who]
    pick = torch.randint(args.popular // GROUPS, (args.batch,))
    bought = torch.stack(by_group)[who % GROUPS, pick]
    other = stock[torch.randint(args.popular, (args.batch,))]

    u = users(user)
    positive = (u * items(bought)).sum(1)
    negative = (u * items(other)).sum(1)
    loss = F.softplus(negative - positive).mean()

    optim.zero_grad()
    loss.backward()
    optim.step()
    losses.append(loss.item())

print(f"loss {sum(losses[:8]) / 8:.4f} -> {sum(losses[-8:]) / 8:.4f}")
