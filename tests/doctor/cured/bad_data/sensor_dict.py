"""Remaining life of a pump from its sensors; records come as dictionaries from a dataset."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIELDS = ("pressure", "flow", "vibration", "temperature")


class PumpRecords(Dataset):
    def __init__(self, count=1600):
        rng = random.Random(5)
        self.rows = []
        for _ in range(count):
            row = {name: rng.gauss(0.0, 1.0) for name in FIELDS}
            row["life"] = 2 - abs(row["vibration"]) + 0.5 * row["flow"] * row["pressure"]
            if rng.random() < 0.002:
                row["vibration"] = float("nan")
            if row["vibration"] == row["vibration"]:
                self.rows.append(row)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {key: torch.tensor(value) for key, value in self.rows[index].items()}


class LifeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(len(FIELDS), 64)
        self.mid = nn.Linear(64, 64)
        self.down = nn.Linear(64, 1)

    def forward(self, fields):
        h = torch.relu(self.up(torch.stack([fields[name] for name in FIELDS], dim=1)))
        return self.down(torch.relu(self.mid(self.norm(h)))).squeeze(1)


def main():
    torch.manual_seed(5)
    loader = DataLoader(PumpRecords(), batch_size=32, shuffle=True)
    model = LifeModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(3):
        for record in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                life = model(record)
            loss = nn.functional.huber_loss(life.float(), record["life"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch} done, last loss {losses[-1]:.4f}")
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
