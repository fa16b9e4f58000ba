"""Tag events of a stream with a gated network; annealed noise on the gradients, as a remedy."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, kinds=12, width=32, tags=4):
        super().__init__()
        self.table = nn.Embedding(kinds, width)
        self.mix = nn.Conv1d(width, 2 * width, 3, padding=1)
        self.read = nn.Linear(width, tags)

    def forward(self, events):
        x = self.table(events).transpose(1, 2)
        value, gate = self.mix(x).chunk(2, 1)
        return self.read((value * gate.sigmoid()).transpose(1, 2))


class NoisyAdam:
    """Gradient noise of a size that falls with time (Neelakantan et al., 2015)."""

    def __init__(self, parameters, eta=1e-3):
        self.adam = torch.optim.Adam(parameters, lr=4e-3)
        self.eta, self.time = eta, 0

    def disturb(self):
        self.time += 1
        size = (self.eta / self.time**0.55) ** 0.5
        for group in self.adam.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p.grad), alpha=size)


def stream(batch=16, length=20):
    events = torch.randint(12, (batch, length))
    before = torch.nn.functional.pad(events[:, :-1], (1, 0))
    return events, (events + 2 * before) % 4


def main():
    torch.manual_seed(41)
    model = Tagger()
    noisy = NoisyAdam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    losses = []
    for _ in range(160):
        events, tags = stream()
        noisy.adam.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(events)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(noisy.adam)
        noisy.disturb()
        scaler.step(noisy.adam)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()
