"""Reward model on episodes of varying number; returns are standardised within the batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Episodes(Dataset):
    def __init__(self, n=721, length=10, seed=29):
        g = torch.Generator().manual_seed(seed)
        self.obs = torch.randn(n, length, 6, generator=g)
        gain = torch.tensor([0.9, -0.4, 0.3, 0.0, 0.2, 0.0])
        self.returns = 40 + 9 * torch.tanh(self.obs @ gain).sum(1)

    def __len__(self):
        return len(self.obs)

    def __getitem__(self, i):
        return self.obs[i], self.returns[i]


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return self.step(obs).float().squeeze(-1).sum(1)


def standardise(returns):
    return (returns - returns.mean()) / (returns.std() + 1e-5)


torch.manual_seed(29)
loader = DataLoader(Episodes(), batch_size=24)
model = RewardModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
losses = []
for epoch in range(5):
    for obs, returns in loader:
        target = standardise(returns)
        with torch.autocast("cpu", torch.bfloat16):
            score = model(obs)
        loss = nn.functional.smooth_l1_loss(score, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch} last batch {losses[-1]:.4f}")
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
