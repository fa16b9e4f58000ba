"""Embed points so that their distances match given ones (a parametric multidimensional scaling)."""

import torch
from torch import nn

torch.manual_seed(16)
points = torch.randn(600, 4) @ torch.randn(4, 24) / 2


def pairwise(x):
    diff = x[:, None, :] - x[None, :, :]
    return diff.pow(2).sum(-1).sqrt()


class Embed(nn.Module):
    def __init__(self, inputs=24, outputs=3):
        super().__init__()
        self.first = nn.Linear(inputs, 64)
        self.second = nn.Linear(64, outputs)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


model = Embed()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
scaler = torch.amp.GradScaler("cpu")
averaged = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95)
)

stress = []
for epoch in range(10):
    for rows in torch.randperm(len(points)).split(40):
        batch = points[rows]
        with torch.autocast("cpu", dtype=torch.float16):
            code = model(batch)
        loss = (pairwise(code.float()) - pairwise(batch)).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        averaged.update_parameters(model)
        stress.append(loss.item())
    print(f"epoch {epoch}: stress {stress[-1]:.4f}")

print(f"loss {sum(stress[:5]) / 5:.4f} -> {sum(stress[-5:]) / 5:.4f}")
