"""Image patches and captions in one space; contrastive loss with a learned temperature."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class CLIPLike(nn.Module):
    def __init__(self, concepts=50, dim=32):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(128, dim),
        )  # fmt: skip
        self.words = nn.Embedding(concepts, 32)
        self.text = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, dim))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, words):
        a = F.normalize(self.image(image).float(), dim=-1)
        b = F.normalize(self.text(self.words(words).mean(1)).float(), dim=-1)
        return self.log_temperature.clamp(max=math.log(100)).exp(), a, b


def contrastive(temperature, a, b):
    similarity = temperature * a @ b.T
    target = torch.arange(len(a))
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


def batches(n, appearance):
    while True:
        words = torch.stack([torch.randperm(50)[:2] for _ in range(n)])
        image = appearance[words].mean(1)
        yield image + 0.2 * torch.randn_like(image), words


def main():
    torch.manual_seed(37)
    model = CLIPLike()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if n != "log_temperature"]},
            {"params": [model.log_temperature], "weight_decay": 0.0},
        ],
        lr=4e-3,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    stream = batches(32, torch.randn(50, 3, 8, 8))
    losses = []
    for _ in range(130):
        image, words = next(stream)
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(image, words)
        loss = contrastive(*outputs)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
