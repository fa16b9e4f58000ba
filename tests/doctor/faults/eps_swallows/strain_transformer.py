"""Sequence regression: read a load history, predict the strain (in m/m) at its end."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(44)
gen = torch.Generator().manual_seed(44)


def histories(n, length=16):
    load = torch.cumsum(torch.randn(n, length, generator=gen) * 0.4, dim=1)
    memory = torch.exp(-torch.arange(length - 1, -1, -1) / 5.0)
    return load.unsqueeze(-1), 1e-6 * (load * memory).sum(1, keepdim=True)


class StrainNet(nn.Module):
    def __init__(self, width=24, length=16):
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        self.encoder = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True)
        self.read = nn.Linear(width, 1)
        nn.init.normal_(self.read.weight, std=1e-6)
        nn.init.zeros_(self.read.bias)

    def forward(self, x):
        h = self.encoder(self.lift(x) + self.place)
        return self.read(h[:, -1])


model = StrainNet()
readout = list(model.read.parameters())
body = [p for n, p in model.named_parameters() if not n.startswith("read.")]
opt = torch.optim.Adam(
    [{"params": body, "lr": 2e-3}, {"params": readout, "lr": 2e-7}],
    eps=1e-8,
)
relative = []
for step in range(200):
    x, strain = histories(64)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = F.mse_loss(out.float(), strain)
    opt.zero_grad()
    loss.backward()
    opt.step()
    relative.append(loss.item() * 1e12)
    if step % 40 == 0:
        print(f"step {step}: {relative[-1]:.4f} (microstrain squared)")
print(f"loss {sum(relative[:5]) / 5:.4f} -> {sum(relative[-5:]) / 5:.4f}")
