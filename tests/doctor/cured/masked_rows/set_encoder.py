"""Predict the total weight of a basket: attention over its items, baskets of any size."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MAX_ITEMS, KINDS = 8, 20


class Baskets(Dataset):
    def __init__(self, count=960):
        self.weight = torch.rand(KINDS)
        self.size = torch.randint(1, MAX_ITEMS + 1, (count,))
        self.items = torch.randint(KINDS, (count, MAX_ITEMS))

    def __len__(self):
        return len(self.size)

    def __getitem__(self, i):
        padding = torch.arange(MAX_ITEMS) >= self.size[i]
        weights = self.weight[self.items[i]].masked_fill(padding, 0.0)
        return self.items[i], padding, weights.sum()


class SetModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.item = nn.Embedding(KINDS, dim)
        self.query = nn.Parameter(0.1 * torch.randn(1, 1, dim))
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.head = nn.Sequential(nn.Linear(dim + 1, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, items, padding):
        h = self.item(items)
        query = self.query.expand(len(h), -1, -1)
        pooled, _ = self.attention(query, h, h, key_padding_mask=padding)
        count = (~padding).sum(1, keepdim=True) / MAX_ITEMS
        return self.head(torch.cat([pooled[:, 0], count.to(pooled.dtype)], 1)).squeeze(1)


def main():
    torch.manual_seed(30)
    model = SetModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(Baskets(), batch_size=48, shuffle=True)
    losses = []
    for _ in range(6):
        for items, padding, total in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                pred = model(items, padding)
            loss = nn.functional.mse_loss(pred.float(), total)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
