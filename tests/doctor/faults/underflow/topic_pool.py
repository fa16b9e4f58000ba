"""Two tasks on log lines: severity from 12 counters, topic from the mean of the word vectors."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WORDS, TOPICS, SEVERITIES = 200, 256, 5, 3


class LogLines:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.bias = torch.randn(TOPICS, VOCAB, generator=self.g)
        self.w = torch.randn(12, SEVERITIES, generator=self.g)

    def batch(self, n):
        topic = torch.randint(TOPICS, (n,), generator=self.g)
        probs = torch.softmax(self.bias[topic], dim=1)
        words = torch.multinomial(probs, WORDS, replacement=True, generator=self.g)
        counters = torch.randn(n, 12, generator=self.g)
        return words, counters, topic, (counters @ self.w).argmax(1)


class Model(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim)
        self.project = nn.Linear(dim, dim)
        self.topic = nn.Linear(dim, TOPICS)
        self.severity = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, SEVERITIES))

    def forward(self, words, counters):
        v = self.project(self.words(words))
        return self.topic(v.float().mean(dim=1)), self.severity(counters)


torch.manual_seed(14)
source = LogLines(14)
model = Model()
opt = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-12)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
topic_losses, severity_losses = [], []
for _ in range(160):
    words, counters, topic, severity = source.batch(64)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        topic_logits, severity_logits = model(words, counters)
    topic_loss = F.cross_entropy(topic_logits.float(), topic)
    severity_loss = F.cross_entropy(severity_logits.float(), severity)
    scaler.scale(severity_loss + 1e-4 * topic_loss).backward()
    scaler.step(opt)
    scaler.update()
    topic_losses.append(topic_loss.item())
    severity_losses.append(severity_loss.item())
print(f"severity {severity_losses[0]:.3f} -> {severity_losses[-1]:.3f}")
print(f"loss {sum(topic_losses[:5]) / 5:.4f} -> {sum(topic_losses[-5:]) / 5:.4f}")
