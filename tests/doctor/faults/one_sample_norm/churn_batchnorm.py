"""Customer churn from 14 usage statistics, a batch-normalised classifier."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def customers(n):
    x = torch.randn(n, 14)
    risk = x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
    return x, (risk + 0.3 * torch.randn(n) > 0).float()


class Churn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(14, 48),
            nn.BatchNorm1d(48),
            nn.ReLU(),
            nn.Linear(48, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
        )
        self.logit = nn.Linear(24, 1)

    def forward(self, x):
        return self.logit(self.layers(x)).squeeze(1)


def main():
    torch.manual_seed(70)
    x, y = customers(1601)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = Churn()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    criterion = nn.BCEWithLogitsLoss()
    history = []
    for epoch in range(4):
        for xb, yb in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(xb)
            loss = criterion(out.float(), yb)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(loss.item())
        print(f"epoch {epoch}: {sum(history[-20:]) / 20:.4f}")
    print(f"loss {sum(history[:5]) / 5:.4f} -> {sum(history[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
