"""fairseq's console (simple and JSON lines, 2018 on), metaseq's, and fairseq2's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from .formats import LineFormat
from .names import field_of
from .numbers import I, N, number, whole
from .row import Row

_NAME = "fairseq"
_SKIP = re.compile(
    r"(?:WARNING|NOTE): (?:gradient )?overflow detected, (?:ignoring gradient, )?"
    rf"setting loss scale to: (?P<next>{N})"
)
_AMP = re.compile(rf"AMP: overflow detected, setting scale to (?:to )?(?P<next>{N})")
_PARAMETER = re.compile(r"overflow in param (?P<name>[\w.]{1,300})")
_SIMPLE = re.compile(rf"epoch {I}:\s+{I} / {I} (?P<rest>\w+=.*)")
_BAR = re.compile(
    rf"{I}/{I} \[[^\],]{{3,20}},[^\],]{{1,20}}, (?P<rest>\w{{1,40}}=[^\]]{{0,2000}})\]"
)
_EPOCH = re.compile(rf"epoch {I} \| (?P<rest>(?:train )?loss .*)")
_METRICS2 = re.compile(r"Train Metrics \(step (?P<step>[\d,]{1,18})\) - (?P<rest>.*)")
_SKIP2 = re.compile(
    rf"Overflow detected at step (?P<step>{I}), ignoring gradient, decreasing loss scale "
    rf"from (?P<scale>{N}) to (?P<next>{N})"
)
_FLOOR2 = re.compile(
    rf"Overflow detected at step (?P<step>{I}), .*already at minimum \((?P<scale>{N})\)"
)
_GROWN2 = re.compile(
    rf"after step (?P<step>{I}), increasing loss scale from (?P<scale>{N}) to (?P<next>{N})"
)


def _skips(line: str) -> Iterator[Row]:
    for expression in (_SKIP, _AMP):
        for found in expression.finditer(line):
            yield Row(_NAME, next_scale=number(found["next"]), skipped=True, counted=False)


def _parameter(line: str) -> Iterator[Row]:
    found = _PARAMETER.search(line)
    if found:
        yield Row(_NAME, culprit=found["name"], counted=False)


def _metrics(facts: dict[str, object]) -> Iterator[Row]:
    known = {field: number(v) for k, v in facts.items() if (field := field_of(k))}
    step = whole(known.get("step"))
    if step is None:
        return
    scale = known.get("next_scale")
    yield Row(
        _NAME,
        step=step,
        loss=known.get("loss"),
        norm=known.get("norm"),
        lr=known.get("lr"),
        next_scale=scale if scale and math.frexp(scale)[0] == 0.5 else None,  # else it is a mean
        counted=False,
    )


def _simple(line: str) -> Iterator[Row]:
    found = _SIMPLE.search(line) or _BAR.search(line)
    if found:
        pairs = (part.partition("=") for part in found["rest"].split(", "))
        yield from _metrics({name.strip(): value for name, _, value in pairs})


def _epoch(line: str) -> Iterator[Row]:
    """The means of an epoch, at its last update."""
    found = _EPOCH.search(line) if "valid" not in line else None
    if found:
        pairs = (part.strip().rpartition(" ") for part in found["rest"].split("|"))
        yield from _metrics({name: value for name, _, value in pairs})


def _json(line: str) -> Iterator[Row]:
    start = line.find('{"epoch"')
    try:
        facts = json.loads(line[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        return
    if isinstance(facts, dict):
        yield from _metrics(facts)


def _floor(line: str) -> Iterator[Row]:
    yield Row(_NAME, skipped=True, floor=True, counted=False)


def _skips2(line: str) -> Iterator[Row]:
    for expression in (_SKIP2, _FLOOR2):
        for found in expression.finditer(line):
            facts = found.groupdict()
            scale = number(facts["scale"])
            yield Row(
                "fairseq2",
                step=whole(facts["step"]),
                scale=scale,
                next_scale=number(facts.get("next", scale)),
                skipped=True,
                floor="next" not in facts,
            )


def _metrics2(line: str) -> Iterator[Row]:
    found = _METRICS2.search(line)
    if not found:
        return
    pairs = [part.strip().rpartition(": ") for part in found["rest"].split("|")]
    facts = {name.lower(): number(value) for name, _, value in pairs}
    known = {field: value for name, value in facts.items() if (field := field_of(name))}
    losses = (value for name, value in facts.items() if name.endswith("loss"))
    yield Row(
        "fairseq2",
        step=whole(found["step"].replace(",", "")),
        loss=known.get("loss", next(losses, None)),
        norm=known.get("norm"),
        lr=known.get("lr"),
        next_scale=known.get("next_scale"),
    )


def _grown2(line: str) -> Iterator[Row]:
    for found in _GROWN2.finditer(line):
        scales = number(found["scale"]), number(found["next"])
        yield Row("fairseq2", whole(found["step"]), scale=scales[0], next_scale=scales[1])


FORMATS = (
    LineFormat(
        _NAME,
        "fairseq 0.5 to 0.12 (simple and json), metaseq",
        ("skips", "scale", "step (updates)", "loss", "norm", "lr", "parameters that overflowed"),
        (
            "the steps of overflows: num_updates does not count them",
            "the loss of a single step: a line has the mean since the last",
            "a scale in a line of metrics that is no power of two: it is rounded, or a mean",
        ),
        {
            " overflow detected, setting": _skips,
            "overflow detected, ignoring gradient, setting loss scale": _skips,
            "overflow in param ": _parameter,
            "num_updates=": _simple,
            "num_updates ": _epoch,
            'num_updates"': _json,
            "Minimum loss scale reached": _floor,
        },
    ),
    LineFormat(
        "fairseq2",
        "fairseq2",
        ("skips", "scale", "step", "loss", "norm", "lr"),
        ("the loss of a single step: a line has the mean since the last",),
        {
            "Overflow detected at step": _skips2,
            "increasing loss scale from": _grown2,
            "Train Metrics (step": _metrics2,
        },
    ),
)
