"""Contextual bandit by policy gradient with a value baseline."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical


@dataclass
class Settings:
    arms: int = 5
    context: int = 8
    batch: int = 128
    steps: int = 250
    lr: float = 0.2
    clip: float = 0.5
    entropy: float = 0.01


class ActorCritic(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(s.context, 32), nn.Tanh())
        self.pi = nn.Linear(32, s.arms)
        self.v = nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.pi(h).float(), self.v(h).float().squeeze(-1)


def play(s):
    torch.manual_seed(101)
    env = torch.randn(s.context, s.arms)
    net = ActorCritic(s)
    opt = torch.optim.SGD(net.parameters(), lr=s.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    regret = []
    for _ in range(s.steps):
        x = torch.randn(s.batch, s.context)
        means = x @ env / s.context**0.5
        with torch.autocast("cpu", torch.float16):
            logits, value = net(x)
        policy = Categorical(logits=logits)
        arm = policy.sample()
        reward = means.gather(1, arm[:, None]).squeeze(1) + 0.1 * torch.randn(s.batch)
        advantage = (reward - value).detach()
        actor = -(policy.log_prob(arm) * advantage).mean()
        critic = 0.5 * (reward - value).square().mean()
        loss = actor + critic - s.entropy * policy.entropy().mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_value_(net.parameters(), s.clip)
        scaler.step(opt)
        scaler.update()
        regret.append((means.max(1).values - means.gather(1, arm[:, None])[:, 0]).mean().item())
    return regret


if __name__ == "__main__":
    r = play(Settings())
    print(f"loss {sum(r[:10]) / 10:.4f} -> {sum(r[-10:]) / 10:.4f}")
