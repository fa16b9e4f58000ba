"""Find the bright cross in a noisy image: predict a probability map over the pixels."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class MapNet(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        self.a = nn.Conv2d(1, ch, 5, padding=2)
        self.b = nn.Conv2d(ch, ch, 3, padding=1)
        self.c = nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = F.relu(self.b(x))
        return self.c(x).flatten(1)


def crosses(n, gen, size=24):
    centre = torch.randint(3, size - 3, (n, 2, 1, 1), generator=gen)
    ys, xs = torch.arange(size).view(1, -1, 1), torch.arange(size).view(1, 1, -1)
    dy, dx = (ys - centre[:, 0]).abs(), (xs - centre[:, 1]).abs()
    image = (((dy == 0) & (dx <= 2)) | ((dx == 0) & (dy <= 2))).float()
    image = image + 0.3 * torch.randn(n, size, size, generator=gen)
    target = torch.exp(-(dy.square() + dx.square()) / 2.0).flatten(1)
    return image[:, None], target / target.sum(1, keepdim=True)


def parse():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--growth-interval", type=int, default=2000)
    p.add_argument("--init-scale", type=float, default=0.5)
    return p.parse_args()


def main():
    args = parse()
    torch.manual_seed(23)
    gen = torch.Generator().manual_seed(23)
    net = MapNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, eps=1e-14)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=args.init_scale, growth_interval=args.growth_interval
    )
    curve = []
    for step in range(args.steps):
        image, target = crosses(8, gen)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(image)
        loss = F.mse_loss(torch.softmax(logits.float(), dim=1), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        curve.append(loss.item() * 1e4)
        if step % 40 == 0:
            print(f"[{step}] error {curve[-1]:.3f}e-4")
    print(f"loss {sum(curve[:4]) / 4:.4f} -> {sum(curve[-4:]) / 4:.4f}")


if __name__ == "__main__":
    main()
