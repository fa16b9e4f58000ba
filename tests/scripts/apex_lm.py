"""A language model with apex: accumulation, clipping of master_params, a checkpoint half way.

Written as users of apex write it; run by `gradlift run --apex`.
"""

import argparse
import math
import os
import tempfile

import torch
from torch import nn

try:
    from apex import amp
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam
except ImportError:
    raise ImportError("Please install apex to use fp16 training.") from None

parser = argparse.ArgumentParser()
parser.add_argument("--fp16_opt_level", "--opt-level", default="O1")
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
parser.add_argument("--max_steps", type=int, default=24)
parser.add_argument("--max_grad_norm", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

TEXT = (
    "the scale is a power of two and the loss is multiplied by it; "
    "the gradients are divided by it before the weights move. "
) * 40


class Model(nn.Module):
    def __init__(self, size, width=32, context=32):
        super().__init__()
        self.token, self.place = nn.Embedding(size, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        layer.norm1, layer.norm2 = FusedLayerNorm(width), FusedLayerNorm(width)
        self.body, self.head = layer, nn.Linear(width, size)

    def forward(self, ids):
        n = ids.shape[1]
        mask = torch.triu(torch.full((n, n), -math.inf, device=ids.device), 1)
        x = self.token(ids) + self.place(torch.arange(n, device=ids.device))
        return self.head(self.body(x, src_mask=mask.to(x.dtype)))


def build():
    torch.manual_seed(args.seed)
    model = Model(len(letters))
    optimizer = FusedAdam(model.parameters(), lr=5e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / args.max_steps)
    return model, optimizer, decay


letters = sorted(set(TEXT))
ids = torch.tensor([letters.index(c) for c in TEXT])
model, optimizer, scheduler = build()
torch.manual_seed(args.seed + 1)
model.zero_grad()
history = []
for step in range(args.max_steps * args.gradient_accumulation_steps):
    starts = torch.randint(len(ids) - 33, (8,))
    window = torch.stack([ids[s : s + 33] for s in starts])
    logits = model(window[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    history.append(loss.item())
    loss = loss / args.gradient_accumulation_steps
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    if (step + 1) % args.gradient_accumulation_steps == 0:
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    if step + 1 == args.max_steps * args.gradient_accumulation_steps // 2:
        path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "amp": amp.state_dict(), "schedule": scheduler.state_dict()}, path)
        model, optimizer, scheduler = build()
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        scheduler.load_state_dict(saved["schedule"])
        torch.manual_seed(args.seed + 2)

print(f"loss {sum(history[-40:]) / 40:.4f}")
print("amp", amp.state_dict())
