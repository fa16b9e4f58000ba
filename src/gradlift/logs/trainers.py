"""Console lines of trainers that print one line a step, or a dictionary: transformers, nanoGPT,
torchtitan, Keras; and apex's message, which names no step."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .formats import LineFormat
from .names import field_of
from .numbers import I, N, number, whole
from .row import Row

_DICT = re.compile(r"\{'[^{}]{1,20000}\}")
_PAIR = re.compile(rf"'([^']{{1,200}})': '?({N})'?(?=[,}}])")
_NANOGPT = re.compile(rf"(?:^|\s)iter (?P<step>{I}): loss (?P<loss>{N}), time ")
_TITAN = re.compile(
    rf"(?<!validate )step:\s*(?P<step>{I})\s+loss:\s*(?P<loss>{N})"
    rf"\s+(?:grad_norm:\s*(?P<norm>{N})|memory:)"
)
_KERAS = re.compile(rf"(?P<done>{I})/(?P<all>{I}) [^\w\s]{{1,200}} (?:- )?\d{{1,9}}s\b(?P<rest>.*)")
_KERAS_EPOCH = re.compile(rf"^Epoch (?P<epoch>{I})/{I}$")
_KERAS_PAIR = re.compile(rf" - ([\w/ ]{{1,80}}): ({N})")
_APEX = re.compile(
    rf"Gradient overflow\.\s+Skipping step, (?:loss scaler (?P<key>{I}) )?"
    rf"reducing loss scale to (?P<next>{N})"
)


def transformers(facts: dict[str, float | None], step: int | None = None) -> Row | None:
    """One entry of transformers' log, from its console or its trainer_state.json."""
    if "loss" not in facts and "grad_norm" not in facts:
        return None  # an evaluation, or the summary at the end
    known = {field: value for name, value in facts.items() if (field := field_of(name))}
    if known.get("loss") is known.get("norm") is None:
        return None
    in_all = whole(known.get("skips_in_all"))
    return Row(
        "transformers",
        step=whole(known.get("step")) if step is None else step,
        loss=known.get("loss"),
        norm=known.get("norm"),
        lr=known.get("lr"),
        next_scale=known.get("next_scale"),
        skips_in_all=in_all,
    )


def _dicts(line: str) -> Iterator[Row]:
    for found in _DICT.finditer(line):
        row = transformers({k: number(v) for k, v in _PAIR.findall(found[0])})
        if row:
            yield row


def _nanogpt(line: str) -> Iterator[Row]:
    found = _NANOGPT.search(line)
    if found:
        yield Row("nanogpt", whole(found["step"]), number(found["loss"]))


def _titan(line: str) -> Iterator[Row]:
    found = _TITAN.search(line)
    if found:
        yield Row("torchtitan", whole(found["step"]), number(found["loss"]), number(found["norm"]))


def _keras_epoch(line: str) -> Iterator[Row]:
    found = _KERAS_EPOCH.match(line)
    if found:
        yield Row("keras", step=whole(found["epoch"]), in_epochs=True)


def _keras(line: str) -> Iterator[Row]:
    """The last line of an epoch; steps are epochs."""
    found = _KERAS.search(line)
    if not found or found["done"] != found["all"]:
        return
    facts = {name: number(value) for name, value in _KERAS_PAIR.findall(found["rest"])}
    known = {field: value for name, value in facts.items() if (field := field_of(name))}
    if "loss" in known:
        yield Row(
            "keras",
            loss=known["loss"],
            norm=known.get("norm"),
            next_scale=known.get("next_scale"),
            in_epochs=True,
        )


def _apex(line: str) -> Iterator[Row]:
    for found in _APEX.finditer(line):
        key = found["key"] if found["key"] not in (None, "0") else ""
        yield Row("apex", next_scale=number(found["next"]), skipped=True, key=key)


_MEAN = "the loss of a single step: it is a mean of those since the last line"

FORMATS = (
    LineFormat(
        "apex",
        "apex's amp and fp16_utils",
        ("skips", "scale after an overflow", "which loss"),
        ("steps", "growth of the scale", "the loss, the norm"),
        {"Gradient overflow.": _apex},
    ),
    LineFormat(
        "transformers",
        "transformers 4 and 5: the console's dictionaries, trainer_state.json",
        ("loss", "norm", "lr", "scale and skips (with gradlift's ScaleCallback)"),
        (
            _MEAN,
            "losses that were not finite: logging_nan_inf_filter replaces them, often by 0.0",
            "the step, in the console, if there is no progress bar: lines are counted",
            "the scale and skips, without ScaleCallback",
        ),
        {"'loss':": _dicts},
    ),
    LineFormat(
        "nanogpt",
        "nanoGPT and scripts that print as it does",
        ("step", "loss"),
        ("the scale, skips, the norm",),
        {": loss ": _nanogpt},
    ),
    LineFormat(
        "torchtitan",
        "torchtitan 0.1 to 0.3",
        ("step", "loss", "norm"),
        ("the scale, skips",),
        {"step:": _titan},
    ),
    LineFormat(
        "keras",
        "Keras 2 and 3: the console of fit, one line an epoch",
        ("loss", "scale, skips and norm (with gradlift's ScaleLogger)"),
        ("steps: an epoch is one", "the loss of a single step: it is the mean of an epoch"),
        {" - loss: ": _keras, "Epoch ": _keras_epoch},
    ),
)
