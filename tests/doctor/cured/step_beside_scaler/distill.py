"""A small student learns from a fixed teacher; the trainer can run with or without AMP."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    steps: int = 200
    batch: int = 48
    lr: float = 0.2
    temperature: float = 2.0
    max_norm: float = 1.0
    amp: bool = True
    seed: int = 4


def mlp(*sizes):
    layers = []
    for i in range(len(sizes) - 2):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


class Distiller:
    def __init__(self, cfg):
        self.cfg = cfg
        self.teacher = mlp(20, 128, 10).eval().requires_grad_(False)
        for p in self.teacher.parameters():
            p.mul_(3.0)
        self.student = mlp(20, 32, 32, 10)
        self.opt = torch.optim.SGD(self.student.parameters(), lr=cfg.lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=cfg.amp)

    def loss(self, x):
        t = self.cfg.temperature
        with torch.no_grad():
            target = F.log_softmax(self.teacher(x) / t, dim=1)
        with torch.autocast("cpu", torch.float16, enabled=self.cfg.amp):
            logits = self.student(x)
        pred = F.log_softmax(logits.float() / t, dim=1)
        return F.kl_div(pred, target, log_target=True, reduction="batchmean") * t * t

    def step(self, x):
        self.opt.zero_grad(set_to_none=True)
        loss = self.loss(x)
        self.scaler.scale(loss).backward()
        if self.cfg.max_norm > 0:
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.student.parameters(), self.cfg.max_norm)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


def main():
    cfg = Config(max_norm=0.0)
    torch.manual_seed(cfg.seed)
    run = Distiller(cfg)
    losses = [run.step(torch.randn(cfg.batch, 20)) for _ in range(cfg.steps)]
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
