"""Count dots in an image; large batches are put together from small ones."""

import torch
import torch.nn.functional as F
from torch import nn

ACCUM = 8
MICRO = 4


def scene(size):
    count = torch.randint(1, 7, (size,))
    image = torch.zeros(size, 1, 14, 14)
    for i, n in enumerate(count.tolist()):
        spots = torch.randint(0, 14, (n, 2))
        image[i, 0, spots[:, 0], spots[:, 1]] = 1.0
    return image + 0.05 * torch.randn_like(image), image.sum((1, 2, 3))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(self.features(x)).squeeze(1)


def main():
    torch.manual_seed(6)
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses, window = [], 0.0
    for micro_step in range(90 * ACCUM):
        images, counts = scene(MICRO)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(images)
        loss = F.mse_loss(pred.float(), counts)
        window += loss.item()
        scaler.scale(loss / ACCUM).backward()
        if (micro_step + 1) % ACCUM == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(window / ACCUM)
            window = 0.0
    print(f"loss {sum(losses[:3]) / 3:.4f} -> {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
