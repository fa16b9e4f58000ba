"""Reinforcement learning in float16: a tiny transformer learns to sort digits from rewards alone.

    python examples/torch_rl_fp16.py                     # 300 steps, less than a minute
    python examples/torch_rl_fp16.py --rule dynamic      # PyTorch's rule: the scale never moves
    python examples/torch_rl_fp16.py --rule off          # float16 without scaling: hardly learns
    python examples/torch_rl_fp16.py --dtype float32     # to compare

Each prompt is answered GROUP times; an answer's advantage is its reward, normalised inside the
group (GRPO). The loss is a mean over the tokens of a large batch, so its gradients are tiny; and
the run is over before a rule that doubles every 2,000 steps has moved once. `auto` has found its
scale after the first batch, and a batch that overflows is computed again, never lost.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from rich.progress import Progress, TextColumn
from torch import Tensor, nn

from gradlift.torch import GradScaler

LENGTH, SYMBOLS = 4, 8  # of a prompt and of its answer
PROMPTS, GROUP, UPDATES = 16, 8, 2  # answers are sampled once and learned from UPDATES times
WIDTH, LAYERS, HEADS = 32, 2, 2
LR, CLIP, MAX_NORM = 2e-3, 0.2, 1.0
EPS = 1e-15  # Adam's usual 1e-8 is larger than most of these gradients
# The mean is over this many tokens, as when a language model is tuned on 8,192 answers of 8,192
# tokens. Few are sampled here, but each token's gradient is divided by as much as it is there.
TOKENS = 2**26
COLUMNS = (*Progress.get_default_columns(), TextColumn("reward {task.fields[reward]:.3f}"))


class Policy(nn.Module):
    """Symbols in, log-probabilities of each next one out, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.symbols(ids) + self.places.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.blocks(x, mask=mask, is_causal=True)
        return self.head(self.norm(x)).float().log_softmax(-1)


@dataclass
class Rollout:
    """Sampled answers: what was said, how likely it was, how much better than its group's."""

    ids: Tensor  # prompt and answer
    log_probs: Tensor  # of each answer symbol, when it was sampled
    advantages: Tensor
    reward: float  # mean share of symbols that are right


def make_model() -> Policy:
    return Policy()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0, fused=True)


@torch.no_grad()
def make_batch(model: Policy, prompts: int = PROMPTS, group: int = GROUP) -> Rollout:
    """Samples `group` answers to each of some random prompts, and judges them by rule."""
    prompt = torch.randint(SYMBOLS, (prompts, LENGTH)).repeat_interleave(group, 0)
    ids, chosen = prompt, []
    for _ in range(LENGTH):
        log_probs = model(ids)[:, -1]
        symbol = log_probs.exp().multinomial(1)
        chosen.append(log_probs.gather(1, symbol))
        ids = torch.cat([ids, symbol], 1)
    right = ids[:, LENGTH:] == prompt.sort(1).values
    # Counts, not shares: their mean is exact, so that equal answers have exactly zero advantage.
    rewards = right.sum(1).float().view(prompts, group)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = centred / (rewards.std(1, keepdim=True, correction=0) + 1e-6)
    return Rollout(ids, torch.cat(chosen, 1), advantages.flatten(), right.float().mean().item())


def policy_loss(model: Policy, rollout: Rollout) -> Tensor:
    """The clipped objective; importance ratios are those of the weights as they are now."""
    log_probs = model(rollout.ids[:, :-1])[:, LENGTH - 1 :]
    now = log_probs.gather(2, rollout.ids[:, LENGTH:, None]).squeeze(2)
    ratio, advantage = (now - rollout.log_probs).exp(), rollout.advantages[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -gain.sum() / TOKENS


@torch.no_grad()
def heldout_reward(model: Policy) -> float:
    """Share of right symbols, each the likeliest one, on prompts that are always the same."""
    prompt = torch.randint(SYMBOLS, (256, LENGTH), generator=torch.Generator().manual_seed(1))
    ids = prompt
    for _ in range(LENGTH):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(2)], 1)
    return (ids[:, LENGTH:] == prompt.sort(1).values).float().mean().item()


def train(steps: int, seed: int, rule: str, dtype: str) -> tuple[float, float, GradScaler]:
    """The held-out reward before and after, and the scaler."""
    torch.manual_seed(seed)
    half = dtype == "float16"
    model = make_model()
    optimizer = make_optimizer(model)
    scaler = GradScaler("cpu", rule=rule, enabled=half, names=model)
    before = heldout_reward(model)

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=half):
            return policy_loss(model, rollout)

    with Progress(*COLUMNS) as bar:
        task = bar.add_task(dtype, total=steps, reward=before)
        for step in range(steps):
            if step % UPDATES == 0:
                # Not in the closure: a retry learns from the same answers, at a lower scale.
                with torch.autocast("cpu", torch.float16, enabled=half):
                    rollout = make_batch(model)
            # If every group is of one mind there is nothing to learn, and Adam should not coast.
            if rollout.advantages.any():
                scaler.train_step(closure, optimizer, max_norm=MAX_NORM, retries=6, model=model)
            bar.update(task, advance=1, reward=rollout.reward)
    return before, heldout_reward(model), scaler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Policy gradients in float16.")
    parser.add_argument("--rule", default="auto", help="how the scale moves; default: %(default)s")
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)  # on so small a network threads mostly wait for one another
    before, after, scaler = train(**vars(parser.parse_args()))
    print(f"held-out reward {before:.3f} -> {after:.3f}")
    if scaler.is_enabled():
        print(f"scale 2^{math.log2(scaler.get_scale()):g}, {scaler.skipped_steps} steps skipped")
