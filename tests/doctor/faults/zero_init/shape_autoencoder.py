"""Autoencoder for 16x16 drawings of rectangles and crosses."""

import torch
import torch.nn.functional as F
from torch import nn


def draw(n, gen):
    img = torch.zeros(n, 16, 16)
    for i in range(n):
        a, b = torch.randint(0, 8, (2,), generator=gen).tolist()
        h, w = torch.randint(4, 8, (2,), generator=gen).tolist()
        if i % 2:
            img[i, a : a + h, b : b + w] = 1.0
        else:
            img[i, a + h // 2, b : b + w] = 1.0
            img[i, a : a + h, b + w // 2] = 1.0
    return img.flatten(1)


class AutoEncoder(nn.Module):
    def __init__(self, code=24):
        super().__init__()
        self.enc1 = nn.Linear(256, 96)
        self.enc2 = nn.Linear(96, code)
        self.dec1 = nn.Linear(code, 96)
        self.dec2 = nn.Linear(96, 256)
        self.reset_parameters()

    def reset_parameters(self):
        for layer in (self.enc1, self.enc2, self.dec1, self.dec2):
            nn.init.constant_(layer.weight, 0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        z = self.enc2(F.gelu(self.enc1(x)))
        return self.dec2(F.gelu(self.dec1(z)))


def main(steps=240, batch=64):
    gen = torch.Generator().manual_seed(4)
    torch.manual_seed(4)
    images = draw(512, gen)
    model = AutoEncoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu")
    trace = []
    for _ in range(steps):
        x = images[torch.randint(len(images), (batch,), generator=gen)]
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits.float(), x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        trace.append(loss.item())
    print(f"loss {sum(trace[:8]) / 8:.4f} -> {sum(trace[-8:]) / 8:.4f}")


main()
