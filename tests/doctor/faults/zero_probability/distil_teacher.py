"""Train a student on the rounded class probabilities of a teacher (KL divergence)."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(47)
torch.manual_seed(47)

X = rng.normal(size=(1280, 12)).astype(np.float32)
teacher_logits = 3.0 * X @ rng.normal(size=(12, 6)) / np.sqrt(12)
teacher = np.exp(teacher_logits - teacher_logits.max(1, keepdims=True))
teacher = np.round(teacher / teacher.sum(1, keepdims=True), 2)  # as stored in the CSV
teacher = (teacher / teacher.sum(1, keepdims=True)).astype(np.float32)
loader = DataLoader(
    TensorDataset(torch.from_numpy(X), torch.from_numpy(teacher)),
    batch_size=64,
    shuffle=True,
)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(12, 32)
        self.fc2 = nn.Linear(32, 6)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def divergence(logits, p):
    q = torch.softmax(logits.float(), dim=1)
    return (q * (torch.log(q) - torch.log(p))).sum(1).mean()


student = Student()
opt = torch.optim.Adam(student.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
history = []
for _ in range(8):
    for x, p in loader:
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = student(x)
        loss = divergence(logits, p)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        history.append(loss.item())
print(f"loss {np.mean(history[:5]):.4f} -> {np.mean(history[-5:]):.4f}")
