"""Classify 12x12 pattern images with a two-block mixer."""

import torch
import torch.nn as nn


class Mixer(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, x):
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.n2(x))


class Net(nn.Module):
    def __init__(self, classes=6, dim=24):
        super().__init__()
        self.embed = nn.Linear(9, dim)
        self.blocks = nn.Sequential(Mixer(16, dim), Mixer(16, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = x.unfold(1, 3, 3).unfold(2, 3, 3).reshape(len(x), 16, 9)
        return self.head(self.blocks(self.embed(x)).mean(1))


def get_batch(protos, n, gen):
    y = torch.randint(len(protos), (n,), generator=gen)
    return protos[y] + torch.randn(n, 12, 12, generator=gen), y


def main():
    torch.manual_seed(27)
    gen = torch.Generator().manual_seed(27)
    protos = torch.randn(6, 12, 12, generator=gen)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    losses = []
    for _ in range(100):
        x, y = get_batch(protos, 24, gen)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    norm = sum(p.detach().square().sum() for p in net.parameters()).sqrt().item()
    print(f"weight norm {norm:.3g}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
