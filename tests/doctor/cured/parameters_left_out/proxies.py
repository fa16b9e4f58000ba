"""Metric learning with class proxies on noisy feature vectors."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ProxyLoss(nn.Module):
    def __init__(self, classes, dim, temperature=0.1):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(classes, dim))
        self.temperature = temperature

    def forward(self, embeddings, labels):
        sims = F.normalize(embeddings, dim=1) @ F.normalize(self.proxies, dim=1).T
        return F.cross_entropy(sims / self.temperature, labels)


class EmbeddingNet(nn.Module):
    def __init__(self, inputs, dim):
        super().__init__()
        self.fc1 = nn.Linear(inputs, 24)
        self.fc2 = nn.Linear(24, dim)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def make_data(classes=40, inputs=32, count=1920):
    centres = torch.randn(classes, inputs)
    labels = torch.randint(classes, (count,))
    return TensorDataset(centres[labels] + 0.3 * torch.randn(count, inputs), labels)


def main():
    torch.manual_seed(2024)
    loader = DataLoader(make_data(), batch_size=64, shuffle=True)
    model = EmbeddingNet(32, 4)
    criterion = ProxyLoss(40, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6 * len(loader))
    losses = []
    for _ in range(6):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            criterion.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                embeddings = model(x)
            loss = criterion(embeddings.float(), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
