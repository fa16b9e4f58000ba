"""Weights & Biases: numbers of every step and exponent histograms, in a run of yours or its own."""

from __future__ import annotations

from typing import Any

from .chart_sink import ChartSink, needed, short_facts


class WandB(ChartSink):
    """Logs to `run`, to the run that is under way, or to a new one made from `settings`.

    Charts are over "gradlift/step", which leaves your own steps as they are. In a run of yours the
    numbers are sent with your own calls of `log` (the latest counts); `close` finishes a new one.

    >>> sink = WandB(project="demo", mode="offline")  # the run begins with the journal
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        super().__init__()
        self._wandb = needed("wandb")
        self._run, self._settings = run, settings
        self._own = False

    def header(self, facts: dict[str, Any]) -> None:
        self._run = self._run or self._wandb.run
        if self._run is None:
            self._run, self._own = self._wandb.init(**self._settings), True
        self._run.config.update({"gradlift": short_facts(facts)}, allow_val_change=True)
        self._run.define_metric("gradlift/*", step_metric="gradlift/step")

    def _histogram(self, exponents: range, counts: list[int]) -> Any:
        return self._wandb.Histogram(np_histogram=(counts, [*exponents, exponents.stop]))

    def close(self) -> None:
        if self._own:
            self._run.finish()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        # Committing in a run of somebody else would move its step on, and lose what they log.
        self._run.log({"gradlift/step": step, **values}, commit=self._own)
