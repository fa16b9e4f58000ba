"""Megatron-LM's training log, and that of Megatron-DeepSpeed, GPT-NeoX and Megatron Bridge.

` iteration 122/ 250000 | ... | lm loss: 2.5E+00 | loss scale: 1.0 | ... | number of skipped ...`:
the scale is the one after the update; skipped and nan count since the line before; losses are
means over the applied iterations since then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .formats import LineFormat
from .numbers import I, N, number, whole
from .row import Row

_NAME = "megatron"
_LINE = re.compile(rf"iteration\s+(?P<step>{I})/\s*{I} \|(?P<rest>.*)\|")
_VALUE = re.compile(N)
_TOO_LARGE = re.compile(rf"skipping grad norm because it's too large (?P<norm>{N})")
_LOSSES = ("lm loss", "lm_loss", "loss", "reduced_train_loss", "total loss")


def _line(line: str) -> Iterator[Row]:
    found = _LINE.search(line)
    if not found:
        return
    fields = dict(_fields(found["rest"]))
    loss = next((fields[name] for name in _LOSSES if name in fields), None)
    if loss is None:
        loss = next((v for k, v in fields.items() if k.endswith("loss")), None)
    skips = whole(fields.get("number of skipped iterations"))
    bad = whole(fields.get("number of nan iterations")) or 0
    if skips and loss == 0:
        loss = None  # printed if no iteration was applied since the line before
    yield Row(
        _NAME,
        step=whole(found["step"]),
        loss=loss,
        norm=fields.get("grad norm"),
        lr=fields.get("learning rate"),
        next_scale=fields.get("loss scale"),
        skips=skips,
        bad_losses=bad,
    )


def _fields(rest: str) -> Iterator[tuple[str, float | None]]:
    for part in map(str.strip, rest.split("|")):
        name, _, value = part.partition(":") if ":" in part else part.rpartition(" ")  # 1.0
        found = _VALUE.match(value.lstrip())
        if found:
            yield name.strip().lower(), number(found[0])


def _too_large(line: str) -> Iterator[Row]:
    found = _TOO_LARGE.search(line)
    if found:
        yield Row(_NAME, norm=number(found["norm"]), too_large=True)


FORMATS = (
    LineFormat(
        _NAME,
        "Megatron-LM 1.0 to core 0.16, Megatron-DeepSpeed, GPT-NeoX, Megatron Bridge",
        ("step", "loss", "scale", "norm", "lr", "skips", "nan iterations"),
        (
            "which iterations between two lines were skipped, if not all were",
            "the loss of a single iteration: a line has the mean of those applied since the last",
            "parameters",
        ),
        {"elapsed time per iteration": _line, "skipping grad norm because": _too_large},
    ),
)
