"""Contrastive training of an image tower and a caption tower on synthetic pairs."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.proj = nn.Linear(8 * 25, dim)

    def forward(self, image):
        return self.proj(F.relu(self.conv(image)).flatten(1))


class TextTower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.proj = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, ids):
        return self.proj(self.embed(ids).mean(1))


class Pairs:
    """Scenes made of three objects; the caption lists them among filler words."""

    def __init__(self, seed, objects=14, vocab=40):
        self.gen = torch.Generator().manual_seed(seed)
        self.sprites = torch.randn(objects, 1, 10, 10, generator=self.gen)
        self.vocab = vocab

    def batch(self, n):
        ids = torch.rand(n, len(self.sprites), generator=self.gen).topk(3).indices
        image = self.sprites[ids].sum(1) + 0.5 * torch.randn(n, 1, 10, 10, generator=self.gen)
        fill = torch.randint(len(self.sprites), self.vocab, (n, 3), generator=self.gen)
        return image, torch.cat([ids, fill], 1)


def contrast(a, b, log_temperature):
    a = F.normalize(a.float(), dim=-1, eps=1e-6)
    b = F.normalize(b.float(), dim=-1, eps=1e-6).detach()
    logits = a @ b.T * log_temperature.exp()
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def main():
    torch.manual_seed(24)
    pairs, image_tower, text_tower = Pairs(24), ImageTower(24), TextTower(40, 24)
    log_temperature = nn.Parameter(torch.tensor(math.log(8.0)))
    params = [*image_tower.parameters(), *text_tower.parameters(), log_temperature]
    opt = torch.optim.Adam(params, lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for _ in range(150):
        image, ids = pairs.batch(32)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            i, t = image_tower(image), text_tower(ids)
        loss = contrast(i, t, log_temperature)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()
