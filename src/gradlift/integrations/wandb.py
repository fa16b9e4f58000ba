"""Weights & Biases: numbers of every step and exponent histograms, in a run of yours or its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import GradliftError
from ..journal import Event, Sample, Step
from ._scalars import Scalars, bins, short_facts, worst_shares


class WandB:
    """Logs to `run`, to the run that is under way, or to a new one made from `settings`.

    Charts are over "gradlift/step", so that your own steps stay yours. In a run of yours, numbers
    ride along with your own calls of `log` (the latest counts); a new one is finished by `close`.

    >>> sink = WandB(project="demo", mode="offline")  # the run begins with the journal
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise GradliftError(
                f"the Weights & Biases sink needs wandb ({error}): pip install wandb"
            ) from None
        self._wandb: Any = wandb
        self._run, self._settings = run, settings
        self._own = False
        self._scalars, self._events = Scalars(), Counter[str]()
        self._last = 0

    def header(self, facts: dict[str, Any]) -> None:
        self._run = self._run or self._wandb.run
        if self._run is None:
            self._run, self._own = self._wandb.init(**self._settings), True
        self._run.config.update({"gradlift": short_facts(facts)}, allow_val_change=True)
        self._run.define_metric("gradlift/*", step_metric="gradlift/step")

    def step(self, step: Step) -> None:
        self._last = step.step
        self._log(step.step, self._scalars.of(step))

    def event(self, event: Event) -> None:
        name = f"gradlift/events/{event.what}"
        self._events[name] += 1
        at = self._last if event.step is None else event.step
        self._log(at, {name: self._events[name]})

    def sample(self, sample: Sample) -> None:
        values: dict[str, Any] = dict(worst_shares(sample))
        for name, shares in sample.parameters.items():
            exponents, counts = bins(shares)
            if exponents:
                edges = [*exponents, exponents[-1] + 1]
                histogram = self._wandb.Histogram(np_histogram=(counts, edges))
                values[f"gradlift/exponents/{name}"] = histogram
        self._log(sample.step, values)

    def close(self) -> None:
        if self._own:
            self._run.finish()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        # Committing in a run of somebody else would move its step on, and lose what they log.
        self._run.log({"gradlift/step": step, **values}, commit=self._own)
