"""Findings about the first operation, input or buffer that was not finite."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ...journal import Event, Run
from .finding import Finding

_DIVIDES = ("div", "reciprocal", "rsqrt", "sqrt", "norm", "pow")
_AT_A_POINT = re.compile(
    r"(Sqrt|Rsqrt|Div|Pow|Log\d*|Norm|LinalgVectorNorm|Acos|Asin|Atanh|Reciprocal|Cdist|Std|Var"
    r"|Exp|Atan2|Xlogy|CosineSimilarity)(Mean)?Backward\d"
)
"""Derivatives that are inf or NaN somewhere. Of any other operation an inf is an overflow, and the
scale may be too high."""


def origins(run: Run) -> list[Event]:
    """Where inf or NaN began, as far as it was found."""
    return [e for e in run.events if e.what == "origin"]


def _text(detail: dict[str, Any], name: str) -> str:
    return str(detail.get(name) or "")


def _at(detail: dict[str, Any]) -> str:
    module, place = _text(detail, "module"), _text(detail, "place")
    before = _text(detail, "before")
    line = f", called from {place}" if place else f", on the way to {before}" if before else ""
    return (f" in {module}" if module else "") + line


def _line(detail: dict[str, Any]) -> str:
    return _text(detail, "place") or _text(detail, "before")


def _made(event: Event) -> str:
    """What happened, in a sentence."""
    d = event.detail
    dtype = f" ({d['dtype']})" if d.get("dtype") else ""
    given = f", {_text(d, 'input')}" if d.get("input") else ""
    return (
        f"At step {event.step} {_text(d, 'op')}{dtype} was the first operation of the "
        f"{_text(d, 'where')} pass to give {_text(d, 'found')}{_at(d)}{given}."
    )


def _finding(
    run: Run, holds: Callable[[dict[str, Any]], bool], kind: str, title: str, advice: str
) -> Finding | None:
    event = next((e for e in origins(run) if holds(e.detail)), None)
    if event is None:
        return None
    return Finding(
        "broken",
        title.format(
            op=_text(event.detail, "op") or "An operation",
            found=_text(event.detail, "found") or "inf or NaN",
            within=f" in {module}" if (module := _text(event.detail, "module")) else "",
        ),
        _made(event),
        (event.step,) if event.step is not None else (),
        (),
        advice,
        kind,
        _line(event.detail),
        "certain",
    )


def bad_data(run: Run) -> Finding | None:
    """The data held inf or NaN."""
    event = next((e for e in origins(run) if e.detail.get("where") == "input"), None)
    if event is None:
        return None
    found, which = _text(event.detail, "found"), _text(event.detail, "input")
    taker = _text(event.detail, "op") or "model"
    return Finding(
        "broken",
        f"The data are not finite: {found} in a batch",
        f"At step {event.step} the {taker} was given {found}: {which}.",
        (event.step,) if event.step is not None else (),
        (),
        "Look at this batch where it is loaded, and leave out or mend what is not finite "
        "(torch.isfinite).",
        "bad-data",
        _line(event.detail),
        "certain",
    )


def poisoned_buffer(run: Run) -> Finding | None:
    """A buffer, such as a running mean, is not finite."""
    event = next((e for e in origins(run) if e.detail.get("where") == "buffer"), None)
    if event is None:
        return None
    name, found = _text(event.detail, "module"), _text(event.detail, "found")
    norm = name.endswith(("running_mean", "running_var"))
    return Finding(
        "broken",
        f"The buffer {name} is not finite",
        f"At step {event.step} it held {found}, while the inputs were finite. A running average "
        "that took in one bad batch stays so for ever.",
        (event.step,) if event.step is not None else (),
        (),
        "Load a checkpoint from before, or call reset_running_stats(); and keep the bad batch out."
        if norm
        else "Guard the lines that write to it: a mean over nothing is NaN, and so is 0 / 0. Load "
        "a checkpoint from before.",
        "poisoned-buffer",
        confidence="certain",
    )


def masked_rows(run: Run) -> Finding | None:
    """A softmax over a row that is masked entirely."""
    return _finding(
        run,
        lambda d: "a row of -inf" in _text(d, "input"),
        "masked-rows",
        "A row of attention is masked entirely",
        "Let each row keep one position at least, mask with a large negative number instead of "
        "-inf, or put zeros where a row is empty.",
    )


def labels_masked(run: Run) -> Finding | None:
    """A mean over no labels."""

    def holds(d: dict[str, Any]) -> bool:
        empty = _text(d, "op").startswith("mean") and "no elements" in _text(d, "input")
        of_count = _text(d, "op") == "div" and _text(d, "dtype").startswith("int")
        zero = of_count and "0 in the divisor" in _text(d, "input")
        zero = zero or (not _text(d, "module") and "0 is what is divided" in _text(d, "input"))
        return _text(d, "op").startswith(("nll_loss", "cross_entropy")) or empty or zero

    return _finding(
        run,
        holds,
        "labels-masked",
        "The loss is a mean over no labels",
        "Skip a batch without labels, or divide the sum (reduction='sum') by the number of "
        "labels, 1 at least.",
    )


def one_sample_norm(run: Run) -> Finding | None:
    """The deviation of one sample."""
    return _finding(
        run,
        lambda d: _text(d, "op") in ("std", "var", "std_mean", "var_mean"),
        "one-sample-norm",
        "The standard deviation of a single sample is taken",
        "Use unbiased=False (correction=0), or leave out batches of one sample (drop_last=True).",
    )


def zero_probability(run: Run) -> Finding | None:
    """The logarithm of a probability that is zero."""
    return _finding(
        run,
        lambda d: _text(d, "op").startswith(("log", "xlogy")) and "0 in" in _text(d, "input"),
        "zero-probability",
        "The logarithm of zero is taken",
        "Compute log-probabilities directly (log_softmax, F.kl_div(..., log_target=True)), or "
        "clamp: p.clamp_min(1e-6).log().",
    )


def forward_overflow(run: Run) -> Finding | None:
    """An activation is beyond float16's largest number."""
    return _finding(
        run,
        lambda d: (
            d.get("dtype") == "float16"
            and d.get("where") == "forward"
            and d.get("module", "") != ""
            and d.get("found") == "inf"
            and not _text(d, "op").startswith((*_DIVIDES[:3], "log"))
        ),
        "forward-overflow",
        "The forward pass overflows float16{within}",
        "Run this module in float32 (torch.autocast(..., enabled=False) around it, inputs in "
        ".float()) or in bfloat16, or normalise what it is given.",
    )


def half_sum(run: Run) -> Finding | None:
    """The loss overflows float16 where it is computed, outside of all modules."""
    return _finding(
        run,
        lambda d: (
            d.get("dtype") == "float16" and d.get("where") == "forward" and not d.get("module")
        ),
        "half-loss",
        "The loss is computed in float16, and overflows there",
        "Compute the loss in float32: loss_function(outputs.float(), targets).",
    )


def custom_backward(run: Run) -> Finding | None:
    """A backward pass of the script's own gives NaN."""
    return _finding(
        run,
        lambda d: (
            d.get("where") == "backward"
            and _text(d, "op").endswith("Backward")
            and "::" not in _text(d, "op")
        ),
        "custom-backward",
        "A custom backward pass is not finite",
        "Compute this backward() in float32 and guard its divisions.",
    )


def bad_operation(run: Run) -> Finding | None:
    """Any other operation at a bad point."""

    def holds(d: dict[str, Any]) -> bool:
        if d.get("where") == "backward":
            return bool(_AT_A_POINT.fullmatch(_text(d, "op")))
        return d.get("where") == "forward"

    return _finding(
        run,
        holds,
        "bad-operation",
        "{op} gives {found}{within}",
        "Keep its input away from the bad point: add an eps inside (sqrt(x + eps), x / (y + eps)), "
        "or clamp it. torch.where does not help: the branch not taken still has a gradient.",
    )
