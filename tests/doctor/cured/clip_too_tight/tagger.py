"""Tag each token of a synthetic sentence with its role; convolution over word vectors."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    """The role of a token depends on its own word and on the word before it."""

    def __init__(self, n=1000, length=12, vocab=40, roles=5, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, vocab, (n, length), generator=g)
        before = torch.cat([torch.zeros(n, 1, dtype=torch.long), self.words[:, :-1]], dim=1)
        self.roles = (self.words % roles + 2 * (before > vocab // 2)) % roles

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.roles[i]


class Tagger(nn.Module):
    def __init__(self, vocab=40, dim=24, roles=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, 48, 3, padding=1)
        self.out = nn.Linear(48, roles)

    def forward(self, ids):
        h = self.conv(self.emb(ids).transpose(1, 2)).relu()
        return self.out(h.transpose(1, 2))


def main():
    torch.manual_seed(3)
    loader = DataLoader(Sentences(), batch_size=50, shuffle=True)
    model = Tagger()
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    max_norm = 1.0
    losses = []
    for _ in range(5):
        for ids, roles in loader:
            opt.zero_grad()
            with torch.autocast("cpu", torch.float16):
                scores = model(ids)
            loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), roles.flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


main()
