"""Under which names trainers log the numbers that a `Row` has."""

from __future__ import annotations

import re
from functools import lru_cache

_WORDS = re.compile(r"[\s_\-/.]+")
_NAMES = {
    "step": "step, global step, trainer/global step, train/global step, num updates, "
    "train num updates, iteration, iter, update step",
    "epoch": "epoch, train/epoch",
    "loss": "loss, train loss, train/loss, training loss, loss/train, loss/train/total, lm loss, "
    "train/lm loss, lm loss training/lm loss, train/samples/train loss, batch loss, epoch loss, "
    "loss metrics/global avg loss, train loss step, train/loss step, train/train loss, "
    "train inner/loss, train/global loss, total loss, train/total loss",
    "norm": "grad norm, train/grad norm, gradnorm, gnorm, train inner/gnorm, grad norm/grad norm, "
    "gradient norm, global grad norm, l2 norm/grad/global, total norm, grad norm/total, "
    "grad 2 norm total, train/gradient norm, train/gnorm",
    "lr": "lr, learning rate, train/learning rate, train/lr, train inner/lr, train/samples/lr, "
    "epoch learning rate, learning rate/learning rate",
    "next_scale": "loss scale, train/loss scale, train/samples/loss scale, train inner/loss scale, "
    "loss scale/loss scale, grad scale, amp scale, grad scaler/scale",
    "skips_in_all": "skipped steps, skipped, train/skipped steps, train/skipped",
}


def _plain(name: str) -> str:
    return _WORDS.sub(" ", name.strip().lower()).strip()


_FIELD = {_plain(name): field for field, names in _NAMES.items() for name in names.split(",")}


@lru_cache(4096)
def field_of(name: str) -> str | None:
    """The field of a `Row` (or "epoch") that a logged name means; None for any other name.

    >>> field_of("train/grad_norm"), field_of("Train/Samples/loss_scale"), field_of("val_loss")
    ('norm', 'next_scale', None)
    """
    return _FIELD.get(_plain(name))
