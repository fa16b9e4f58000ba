"""Multi-label tags of photo thumbnails read from several folders."""

import torch
import torch.nn.functional as F
from torch import nn

TAGS, SIDE = 5, 8


class Folder:
    def __init__(self, patterns, batches, raw=False):
        self.patterns, self.batches, self.raw = patterns, batches, raw

    def __iter__(self):
        for _ in range(self.batches):
            tags = (torch.rand(32, TAGS) < 0.4).float()
            photo = 0.5 + 0.15 * torch.einsum("bt,tchw->bchw", tags, self.patterns)
            photo = photo + 0.1 * torch.randn_like(photo)
            yield (photo * 255).clamp(0, 255) if self.raw else photo.clamp(0, 1), tags


class Tagger(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.fc1 = nn.Linear(3 * SIDE * SIDE, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, TAGS)

    def forward(self, photo):
        x = F.relu(self.fc1((photo - 0.5).flatten(1) * 4))
        return self.fc3(F.relu(self.fc2(x)))


def main():
    torch.manual_seed(66)
    patterns = torch.randn(TAGS, 3, SIDE, SIDE)
    folders = [Folder(patterns, 80), Folder(patterns, 1, raw=True), Folder(patterns, 90)]
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    losses = []
    for folder in folders:
        for photo, tags in folder:
            photo = photo / 255 if folder.raw else photo
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(photo)
            loss = F.binary_cross_entropy_with_logits(logits.float(), tags)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    print(f"loss {sum(losses[:5]) / 5:.4f} -> {sum(losses[-5:]) / 5:.4f}")


if __name__ == "__main__":
    main()
