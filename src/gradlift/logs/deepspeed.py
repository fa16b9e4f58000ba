"""DeepSpeed's console, all wordings since 0.1, and ColossalAI's, which follows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .formats import LineFormat
from .numbers import I, N, number, whole
from .row import Row

_NAME = "deepspeed"
_SKIP = re.compile(
    r"(?:OVERFLOW!|fp16 dynamic loss scale overflow!|Overflow detected\.) "
    rf"(?:Rank (?P<rank>{I}) )?Skipping step\. Attempted loss scale: (?P<scale>{N}), "
    rf"(?:reducing to (?P<next>{N})|but hysteresis is (?P<left>{I})\. Reducing hysteresis to {I})"
)
_RANK = re.compile(rf"\[Rank (?P<rank>{I})\] $")
_GRAD = re.compile(rf"Grad overflow on iteration:? (?P<step>{I})")
_MOVED = re.compile(
    rf"(?P<way>Reducing|Increasing) dynamic loss scale from (?P<scale>{N}) to (?P<next>{N})"
)
_STEP = re.compile(rf"step=(?P<step>{I}), skipped=(?P<skipped>{I}), lr=\[(?P<lr>{N})?")
_PIPE = re.compile(rf"steps: (?P<step>{I}) loss: (?P<loss>{N}) ")
_WARNING = re.compile(r"^\[[\d,: -]{19,26}\] \[WARNING\] \[\w{1,60}\.py:\d{1,6}:\w{1,80}\]")
_STATIC = "OVERFLOW! Skipping step. Gradients are non-finite"
_COLOSSAL = re.compile(
    rf"Overflow occurs, the loss scale is adjusted to (?P<next>{N})|Found overflow\. Skip step"
)


def _skips(line: str) -> Iterator[Row]:
    for found in _SKIP.finditer(line):
        scale, after = number(found["scale"]), number(found["next"])
        before = _RANK.search(line, max(0, found.start() - 40), found.start())
        rank = whole(found["rank"] or (before["rank"] if before else None))
        kept = found["left"] is not None or (after == scale and (scale or 0) > 1)
        yield Row(
            _NAME,
            scale=scale,
            next_scale=scale if after is None else after,
            skipped=True,
            floor=after is not None and after == scale and (scale or 0) <= 1,
            hysteresis=kept,
            rank=rank,
        )


def _static(line: str) -> Iterator[Row]:
    if _STATIC in line:
        yield Row(_NAME, skipped=True, static=True)


def _legacy(line: str) -> Iterator[Row]:
    """Stage 0: the overflow and the change of scale are two lines."""
    for found in _GRAD.finditer(line):
        yield Row(_NAME, step=int(found["step"]) + 1, skipped=True)  # the others count from 1


def _moved(line: str) -> Iterator[Row]:
    for found in _MOVED.finditer(line):
        scales = number(found["scale"]), number(found["next"])
        yield Row(_NAME, scale=scales[0], next_scale=scales[1], skipped=found["way"] == "Reducing")


def _steps(line: str) -> Iterator[Row]:
    for found in _STEP.finditer(line):
        yield Row(
            _NAME,
            step=whole(found["step"]),
            lr=number(found["lr"]),
            skips_in_all=whole(found["skipped"]),
        )


def _pipeline(line: str) -> Iterator[Row]:
    for found in _PIPE.finditer(line):
        yield Row(_NAME, step=whole(found["step"]), loss=number(found["loss"]))


def _minimum(line: str) -> Iterator[Row]:
    yield Row(_NAME, skipped=True, floor=True)


def _info(line: str) -> Iterator[Row]:
    yield Row(_NAME, sign=1)


def _warning(line: str) -> Iterator[Row]:
    if _WARNING.match(line):
        yield Row(_NAME, sign=0)


def _colossal(line: str) -> Iterator[Row]:
    """Verbose, it says so twice: where the scale goes, and that the step is skipped."""
    for found in _COLOSSAL.finditer(line):
        scale = number(found["next"])
        yield Row("colossalai", skipped=True, next_scale=scale, closes=scale is None)


FORMATS = (
    LineFormat(
        _NAME,
        "DeepSpeed 0.1 to 0.19: stages 0 to 3, pipeline engine",
        ("skips", "scale", "step", "lr", "loss (pipeline engine)", "hysteresis"),
        (
            "whether an overflow came from a loss that was not finite",
            "the steps of overflows that have no number beside them: they are numbered in order",
            "overflows that the log level hid: since 0.17.6 no OVERFLOW line does not mean that "
            'there was no overflow ("log_level": "info" shows them)',
            "growth of the scale in stages 1 to 3",
        ),
        {
            "Skipping step. Attempted loss scale": _skips,
            "Grad overflow on iteration": _legacy,
            " dynamic loss scale from ": _moved,
            "OVERFLOW! Skipping step. Gradients": _static,
            ", skipped=": _steps,
            "samples/sec": _pipeline,
            "Current loss scale already at minimum": _minimum,
            "] DeepSpeed info: version": _info,
            "] [WARNING] [": _warning,
        },
        wraps=("OVERFLOW!", "Attempted loss"),
    ),
    LineFormat(
        "colossalai",
        "ColossalAI's console",
        ("skips", "scale, if verbose"),
        ("steps", "the loss, the norm"),
        {"Overflow occurs, the loss scale": _colossal, "Found overflow. Skip": _colossal},
    ),
)
