"""Fine-tuning of a small vision transformer with apex: a pretrained body, a new head, warm-up.

Written in the imports and calls of public fine-tuning scripts; run by `gradlift run --apex`.
"""

import argparse
import logging
import math
import random

import numpy as np
import torch
import torch.distributed as dist
from apex import amp
from apex.normalization.fused_layer_norm import FusedLayerNorm as LayerNorm
from apex.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

logger = logging.getLogger(__name__)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm = LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.ffn_norm = LayerNorm(width, eps=1e-6)
        self.ffn = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        attended, weights = self.attn(self.attention_norm(x))
        x = x + attended
        return x + self.ffn(self.ffn_norm(x)), weights


class VisionTransformer(nn.Module):
    """8x8 images in patches of 2x2; with labels it returns the loss, as such models do."""

    def __init__(self, width=32, heads=4, layers=2, num_classes=10):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.encoder_norm = LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x, labels=None):
        x = self.patches(x).flatten(2).transpose(-1, -2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.positions
        seen = []
        for layer in self.layers:
            x, weights = layer(x)
            seen.append(weights)
        logits = self.head(self.encoder_norm(x)[:, 0])
        if labels is None:
            return logits, seen
        return nn.CrossEntropyLoss()(logits.view(-1, logits.shape[-1]), labels.view(-1))


def set_seed(args):
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)


def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def loaders(args):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    train, test = (
        TensorDataset(images[:1408], labels[:1408]),
        TensorDataset(images[1408:], labels[1408:]),
    )
    return (
        DataLoader(train, sampler=RandomSampler(train), batch_size=args.train_batch_size),
        DataLoader(test, sampler=SequentialSampler(test), batch_size=args.eval_batch_size),
    )


def valid(args, model, loader):
    model.eval()
    right = count = 0
    for batch in loader:
        x, y = (t.to(args.device) for t in batch)
        with torch.no_grad():
            logits = model(x)[0]
        right, count = right + (logits.argmax(-1) == y).sum().item(), count + len(y)
    model.train()
    return right / count


def train(args, model):
    args.train_batch_size //= args.gradient_accumulation_steps
    train_loader, test_loader = loaders(args)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=args.weight_decay
    )
    warm, total = args.warmup_steps, args.num_steps
    scheduler = LambdaLR(
        optimizer,
        lambda step: min(step / warm, 0.5 + 0.5 * math.cos(math.pi * max(step - warm, 0) / total)),
    )
    if args.fp16:
        model, optimizer = amp.initialize(
            models=model, optimizers=optimizer, opt_level=args.fp16_opt_level
        )
        if args.fp16_opt_level in ("O1", "O2"):
            amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    if args.local_rank != -1:
        model = DDP(model, message_size=250000000, gradient_predivide_factor=get_world_size())

    model.zero_grad()
    set_seed(args)
    losses, global_step = [], 0
    while global_step < args.num_steps:
        model.train()
        for step, batch in enumerate(train_loader):
            x, y = (t.to(args.device) for t in batch)
            loss = model(x, y)
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                losses.append(loss.item() * args.gradient_accumulation_steps)
                if args.fp16:
                    params = amp.master_params(optimizer)
                else:
                    params = model.parameters()
                torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                global_step += 1
                if global_step == args.num_steps:
                    break
    model_to_save = model.module if hasattr(model, "module") else model
    torch.save(model_to_save.state_dict(), f"{args.output_dir}/{args.name}_checkpoint.bin")
    saved = torch.load(f"{args.output_dir}/{args.name}_checkpoint.bin")
    assert {t.dtype for t in saved.values()} == {torch.float32}
    print(f"loss {sum(losses[-20:]) / 20:.4f}")
    print(f"accuracy {valid(args, model, test_loader):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="digits")
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--train_batch_size", default=64, type=int)
    parser.add_argument("--eval_batch_size", default=64, type=int)
    parser.add_argument("--learning_rate", default=0.3, type=float)
    parser.add_argument("--weight_decay", default=0, type=float)
    parser.add_argument("--num_steps", default=120, type=int)
    parser.add_argument("--warmup_steps", default=10, type=int)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16_opt_level", "--opt-level", type=str, default="O2")
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.basicConfig(level=logging.WARNING)
    set_seed(args)
    train(args, VisionTransformer().to(args.device))


if __name__ == "__main__":
    main()
