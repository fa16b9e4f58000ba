"""Cosine classifier over padded sets of events; the unit-length op has its own gradient."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class UnitLength(torch.autograd.Function):
    """x / |x|, with the projection onto the tangent plane as gradient."""

    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=-1, keepdim=True)
        unit = x / length.clamp_min(1e-4)
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx, grad):
        unit, length = ctx.saved_tensors
        along = (grad * unit).sum(-1, keepdim=True)
        return (grad - unit * along) / length.clamp_min(1e-4)


class EventSets(Dataset):
    """Up to eight events of five values; missing events are rows of zeros."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(4, (n,), generator=g)
        direction = torch.randn(4, 5, generator=g)
        x = direction[self.label][:, None] + 1.2 * torch.randn(n, 8, 5, generator=g)
        present = torch.arange(8) < torch.randint(3, 9, (n, 1), generator=g)
        self.x = x * present.unsqueeze(-1)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.x[i], self.label[i]


class SetNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Linear(5, dim, bias=False)
        self.out = nn.Linear(dim, 4)

    def forward(self, x):
        return self.out(UnitLength.apply(self.embed(x)).mean(1))


if __name__ == "__main__":
    torch.manual_seed(36)
    loader = DataLoader(EventSets(960, 36), batch_size=32, shuffle=True)
    model = SetNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(5):
        for x, label in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
            loss = nn.functional.cross_entropy(logits.float(), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
