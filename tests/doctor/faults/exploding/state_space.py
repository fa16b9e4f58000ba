"""A linear state-space layer smooths long signals; the target is a slow running mean."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class StateSpace(nn.Module):
    def __init__(self, width, radius):
        super().__init__()
        matrix = torch.randn(width, width)
        radius_now = torch.linalg.eigvals(matrix).abs().max()
        self.A = nn.Parameter(matrix * radius / radius_now)
        self.B = nn.Linear(1, width, bias=False)
        self.C = nn.Linear(width, 1)

    def forward(self, signal):
        state = signal.new_zeros(len(signal), self.A.size(0))
        states = []
        for u in signal.unbind(1):
            state = state @ self.A.T + self.B(u[:, None])
            states.append(state)
        return self.C(torch.stack(states, dim=1)).squeeze(-1)


def signals(n, length):
    noise = torch.randn(n, length)
    kernel = 0.9 ** torch.arange(30.0).flip(0)
    kernel = kernel / kernel.sum()
    target = F.conv1d(F.pad(noise, (29, 0)).unsqueeze(1), kernel.view(1, 1, -1)).squeeze(1)
    return noise, target


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--radius", type=float, default=1.3)
    parser.add_argument("--length", type=int, default=120)
    parser.add_argument("--steps", type=int, default=80)
    args, _ = parser.parse_known_args()

    torch.manual_seed(91)
    model = StateSpace(16, args.radius)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(args.steps):
        noise, target = signals(16, args.length)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(noise)
        loss = F.mse_loss(output.float(), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
