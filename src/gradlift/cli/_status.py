"""The status line of a run, while it runs."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ..analysis.words import power

if TYPE_CHECKING:
    from ..journal import Event, Sample, Step

_SECONDS = 0.5  # between two updates of the line on a terminal
_SECONDS_ELSEWHERE = 30.0  # between two lines in a file


class Status:
    """A sink for the journal: step, scale, skipped, worst headroom; on standard error.

    It does not use rich, which draws a random number when it is imported: a script that imports
    rich after it has set a seed would get other random numbers.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.terminal = quiet, sys.stderr.isatty()
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self.style = "{}" if plain else "\x1b[2m{}\x1b[0m"
        self.skipped = 0
        self.worst = math.inf
        self.shown = 0.0 if self.terminal else time.monotonic()

    def header(self, facts: dict[str, Any]) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def sample(self, sample: Sample) -> None:
        pass

    def step(self, step: Step) -> None:
        self.skipped += step.skipped
        self.worst = min(self.worst, step.headroom())  # NaN is never the smaller one
        wait = _SECONDS if self.terminal else _SECONDS_ELSEWHERE
        if not self.quiet and time.monotonic() - self.shown >= wait and not self.taken():
            self.shown = time.monotonic()
            line = self.line(step)
            self._print(f"{self.style.format(line)}\r" if self.terminal else f"{line}\n")

    def taken(self) -> bool:
        """Does the script draw a progress bar of its own on this terminal?"""
        bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
        theirs = getattr(sys.modules.get("rich"), "_console", None)
        drawn = getattr(theirs, "_live_stack", None) or getattr(theirs, "_live", None)
        return self.terminal and bool(bars or drawn)

    def line(self, step: Step) -> str:
        """gradlift: step 120, scale 2^16, 2 skipped, headroom 3.1 bits at worst"""
        worst = f", headroom {self.worst:.1f} bits at worst" if math.isfinite(self.worst) else ""
        return (
            f"gradlift: step {step.step}, scale {power(step.scale)}, {self.skipped} skipped{worst}"
        )

    def close(self) -> None:
        if self.terminal and not self.quiet and self.shown:
            self._print(" " * 78 + "\r")

    def _print(self, text: str) -> None:
        print(text, end="", file=sys.__stderr__ or sys.stderr, flush=True)
