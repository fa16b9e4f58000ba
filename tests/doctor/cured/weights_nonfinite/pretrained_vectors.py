"""Topic classifier on top of pre-trained word vectors that are brought to unit length."""

import torch
from torch import nn

torch.manual_seed(61)
VOCAB, DIM, TOPICS, LENGTH = 150, 32, 6, 20


def load_vectors():
    vectors = torch.randn(VOCAB, DIM) * (0.5 + torch.rand(VOCAB, 1))
    vectors[0] = 0.0
    return vectors


def unit_rows(vectors):
    return vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-6)


class TopicNet(nn.Module):
    def __init__(self, vectors):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(vectors, freeze=False)
        self.score = nn.Linear(DIM, 1)
        self.out = nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, TOPICS))

    def forward(self, tokens):
        h = self.words(tokens)
        attention = torch.softmax(self.score(h).float(), dim=1)
        return self.out((attention * h).sum(1))


topic_words = torch.randint(1, VOCAB, (TOPICS, 12))


def documents(n):
    topic = torch.randint(TOPICS, (n,))
    from_topic = topic_words[topic].gather(1, torch.randint(12, (n, LENGTH)))
    noise = torch.randint(1, VOCAB, (n, LENGTH))
    tokens = torch.where(torch.rand(n, LENGTH) < 0.4, from_topic, noise)
    length = torch.randint(LENGTH // 2, LENGTH + 1, (n, 1))
    return tokens.masked_fill(torch.arange(LENGTH) >= length, 0), topic


model = TopicNet(unit_rows(load_vectors()))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []
for _ in range(150):
    tokens, topic = documents(48)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float(), topic)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")
