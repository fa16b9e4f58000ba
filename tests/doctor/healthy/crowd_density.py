"""Crowd counting: a density map whose squared error is summed over the pixels of an image."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def scenes(n=192, size=20, people=6):
    g = torch.Generator().manual_seed(8)
    image = 0.2 * torch.randn(n, 1, size, size, generator=g)
    density = torch.zeros(n, 1, size, size)
    where = torch.randint(2, size - 2, (n, people, 2), generator=g)
    for i in range(n):
        for r, c in where[i].tolist():
            image[i, 0, r - 1 : r + 2, c - 1 : c + 2] += 1.5
            density[i, 0, r - 1 : r + 2, c - 1 : c + 2] += 1 / 9
    return TensorDataset(image, density)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 1, 1),
    )


def main(epochs=8):
    torch.manual_seed(8)
    model = build()
    loader = DataLoader(scenes(), batch_size=16, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _epoch in range(epochs):
        for image, density in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                predicted = model(image)
            error = F.mse_loss(predicted.float(), density, reduction="none")
            loss = error.sum(dim=(1, 2, 3)).mean()
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()
