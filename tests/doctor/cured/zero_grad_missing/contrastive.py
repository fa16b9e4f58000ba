"""SimCLR-style contrastive pre-training of vectors under random masks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self, count=768, dim=40):
        self.x = torch.randn(count, 6) @ torch.randn(6, dim)

    def __len__(self):
        return len(self.x)

    def view(self, x):
        return x * (torch.rand_like(x) > 0.3) + 0.2 * torch.randn_like(x)

    def __getitem__(self, i):
        return self.view(self.x[i]), self.view(self.x[i])


class Encoder(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.projector = nn.Linear(64, 16)

    def forward(self, x):
        return self.projector(self.backbone(x))


def nt_xent(a, b, temperature=0.2):
    a, b = F.normalize(a.float(), dim=1), F.normalize(b.float(), dim=1)
    logits = a @ b.T / temperature
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


class Learner:
    def __init__(self):
        self.model = Encoder()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def fit(self, loader, epochs):
        losses = []
        for _ in range(epochs):
            self.model.train()
            for a, b in loader:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    za, zb = self.model(a), self.model(b)
                loss = nt_xent(za, zb)
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                self.optimizer.step()
                losses.append(loss.item())
        return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(TwoViews(), batch_size=64, shuffle=True, drop_last=True)
    losses = Learner().fit(loader, epochs=10)
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
