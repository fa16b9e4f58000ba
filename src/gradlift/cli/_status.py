"""One line that says how a run is doing, while it runs."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

import rich
from rich.console import Console

from .._words import power
from ..formats import FP16
from ..verdict import Verdict

if TYPE_CHECKING:
    from ..journal import Event, Sample, Step

_SECONDS = 0.5  # between two looks of the line on a terminal
_SECONDS_ELSEWHERE = 30.0  # between two lines in a file


class Status:
    """A sink for the journal: step, scale, skipped, worst headroom; on standard error."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.skipped = 0
        self.worst = math.inf
        self.shown = 0.0 if sys.stderr.isatty() else time.monotonic()

    def header(self, facts: dict[str, Any]) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def sample(self, sample: Sample) -> None:
        pass

    def step(self, step: Step) -> None:
        self.skipped += step.verdict is not Verdict.APPLY
        if 0 < step.amax < math.inf:
            self.worst = min(self.worst, math.log2(FP16.max / step.amax))
        wait = _SECONDS if self.console.is_terminal else _SECONDS_ELSEWHERE
        if not self.quiet and time.monotonic() - self.shown >= wait and not self.taken():
            self.shown = time.monotonic()
            end = "\r" if self.console.is_terminal else "\n"
            self.console.print(self.line(step), end=end, style="dim")

    def taken(self) -> bool:
        """Does the script draw a bar of its own on this terminal? Two would only get in the way."""
        bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
        theirs = rich.get_console()
        drawn = getattr(theirs, "_live_stack", None) or getattr(theirs, "_live", None)
        return self.console.is_terminal and bool(bars or drawn)

    def line(self, step: Step) -> str:
        """As in: gradlift: step 120, scale 2^16, 2 skipped, headroom 3.1 bits."""
        worst = f", headroom {self.worst:.1f} bits at worst" if math.isfinite(self.worst) else ""
        return (
            f"gradlift: step {step.step}, scale {power(step.scale)}, {self.skipped} skipped{worst}"
        )

    def close(self) -> None:
        if self.console.is_terminal and not self.quiet and self.shown:
            self.console.print(" " * 78, end="\r")
