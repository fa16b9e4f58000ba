"""A character-level GPT, trained in float16 on the text of Python's own manual.

    python examples/torch_gpt.py                        # 250 steps, two minutes on two cores
    python examples/torch_gpt.py --checkpoint run.pt    # saves there, and goes on from there
    python examples/torch_gpt.py --dtype float32        # no autocast, no scaler: to compare

Float16 gradients vanish below 6e-8, so the loss is multiplied by a large scale before the backward
pass, and the gradients are divided by it before they are clipped and used. Few CPUs are fast in
float16, hence the small model; WIDTH = 256 gives 3.2 million parameters.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.progress import Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

WIDTH, LAYERS, HEADS, DROPOUT = 128, 4, 4, 0.1
CONTEXT, BATCH = 32, 8
LR, MAX_NORM, WARMUP, SAVE_EVERY = 3e-3, 1.0, 20, 50
COLUMNS = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))


def load_text() -> tuple[Tensor, Tensor, int]:
    """Token ids to train on, token ids held out, and the size of the vocabulary."""
    text = "".join(topics[name] for name in sorted(topics))
    ids = {char: i for i, char in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[char] for char in text])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(ids)


def sample_batch(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Random windows of text, and the same windows one character later."""
    starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1))
    windows = tokens[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """Attention, then a perceptron; each looks at normed input and adds to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))))


class GPT(nn.Module):
    """Characters in, the loss of predicting each next one out."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters, self.positions = (nn.Embedding(n, WIDTH) for n in (vocabulary, CONTEXT))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.characters(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The learning rate rises in a line, then falls along half a cosine to a tenth."""

    def factor(step: int) -> float:
        done = min(1.0, max(0, step - WARMUP) / max(1, steps - WARMUP))
        return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def heldout_loss(model: GPT, tokens: Tensor) -> float:
    """Loss on text that was not trained on, in float32."""
    windows = tokens[: 256 * (CONTEXT + 1)].view(256, CONTEXT + 1)
    loss = model.eval()(windows[:, :-1], windows[:, 1:]).item()
    model.train()
    return loss


def train(
    steps: int, seed: int, lr: float, dtype: str, checkpoint: Path | None, planned: int | None
) -> tuple[float, float]:
    """Trains to step `steps`; returns the held-out loss before and after."""
    torch.manual_seed(seed)
    half = dtype == "float16"
    text, heldout, vocabulary = load_text()
    model = GPT(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scheduler = warmup_cosine(optimizer, planned or steps)
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    start = 0
    if checkpoint and checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])
        start = saved["step"]

    before = heldout_loss(model, heldout)
    with Progress(*COLUMNS) as bar:
        task = bar.add_task(dtype, total=steps, completed=start, loss=before)
        for step in range(start + 1, steps + 1):
            inputs, targets = sample_batch(text)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = model(inputs, targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            bar.update(task, advance=1, loss=loss.item())
            if checkpoint and (step % SAVE_EVERY == 0 or step == steps):
                saved = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**saved, "rng": torch.get_rng_state(), "step": step}, checkpoint)
    return before, heldout_loss(model, heldout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a character-level GPT in float16.")
    parser.add_argument("--steps", type=int, default=250, help="train up to this step")
    parser.add_argument("--planned", type=int, help="length of the schedule, if not --steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16")
    parser.add_argument("--checkpoint", type=Path, help="save here; go on from here if it exists")
    before, after = train(**vars(parser.parse_args()))
    print(f"held-out loss {before:.3f} -> {after:.3f}")
