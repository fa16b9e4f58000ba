"""Churn from survey answers; strong dropout, and a stop when validation no longer improves."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def evaluate(model, loader, criterion):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            total += criterion(out.float().squeeze(1), y).item() * len(x)
            count += len(x)
    return total / count


def train_epoch(model, loader, criterion, optimizer, scaler):
    model.train()
    losses = []
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = criterion(out.float().squeeze(1), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


torch.manual_seed(27)
answers = torch.randint(1, 6, (1500, 20)).float()
answers = (answers - answers.mean(0)) / (answers.std(0) + 1e-6)
score = answers @ torch.randn(20) + answers[:, 0] * answers[:, 1]
data = TensorDataset(answers, (score > 0).float())
train_set, valid_set = random_split(data, [1200, 300])
train_loader = DataLoader(train_set, batch_size=60, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=150)

model = nn.Sequential(
    nn.Linear(20, 128), nn.ReLU(), nn.Dropout(0.5),
    nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 1),
)  # fmt: skip
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

best, patience, losses = float("inf"), 3, []
for epoch in range(14):
    losses += train_epoch(model, train_loader, criterion, optimizer, scaler)
    valid = evaluate(model, valid_loader, criterion)
    print(f"epoch {epoch}: validation {valid:.4f}")
    if valid < best:
        best, patience = valid, 3
    else:
        patience -= 1
        if patience == 0:
            print("no improvement, stopping")
            break
print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
