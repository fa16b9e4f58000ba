"""`Row`: what one line of somebody's log says about one step."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Each number is None where the line does not say it; NaN is a number that was printed.

    >>> Row("nanogpt", step=10, loss=2.5).loss
    2.5
    """

    format: str
    step: int | None = None
    """As the log counts; None where the line has no number of its own."""
    loss: float | None = None
    norm: float | None = None
    lr: float | None = None
    scale: float | None = None
    """The scale that the step's gradients carried."""
    next_scale: float | None = None
    """The scale after it."""
    skipped: bool = False
    """This one step was skipped."""
    skips: int | None = None
    """Steps that were skipped since the line before."""
    bad_losses: int = 0
    """How many of `skips` had a loss that was not finite."""
    skips_in_all: int | None = None
    """Steps that were skipped since the start."""
    static: bool = False
    """The scale does not move, or there is none."""
    floor: bool = False
    """The scale was at its smallest value."""
    hysteresis: bool = False
    """The overflow did not lower the scale: it used up one of several that are tolerated."""
    closes: bool = False
    """Nothing more is said about this overflow: what follows is about the next one."""
    too_large: bool = False
    """A step was skipped because its norm was larger than the user allows: that is no overflow."""
    in_epochs: bool = False
    """Steps are epochs: the line with a number of its own begins one, and the next ones have what
    came of it."""
    counted: bool = True
    """Does the log's step number also count steps that were skipped?"""
    sign: int | None = None
    """No step, but a sign of this trainer: 1 if it prints its usual lines, 0 if only warnings."""
    rank: int | None = None
    culprit: str = ""
    key: str = ""
