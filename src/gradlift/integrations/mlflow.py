"""MLflow: numbers of every step as metrics, the run's facts as tags."""

from __future__ import annotations

import re
import time
from typing import Any

from .chart_sink import ChartSink, needed, short_facts

_BATCH = 1000  # the most that MLflow takes in one call
_SECONDS = 10.0


class MLflow(ChartSink):
    """Logs to the run `run_id`, to the one that is active, or to a new one in `experiment`.

    Metrics are sent in batches, of a thousand or of ten seconds, so that training does not wait
    for a server at every step. A new run is ended by `close`.

    >>> sink = MLflow(experiment="demo")  # the run begins with the journal
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str = "gradlift",
    ) -> None:
        super().__init__()
        self._mlflow = needed("mlflow")
        self._client: Any = None
        self._tracking_uri, self._experiment = tracking_uri, experiment
        self.run_id = run_id
        self._own = False
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def header(self, facts: dict[str, Any]) -> None:
        self._client = self._mlflow.MlflowClient(self._tracking_uri)
        active = self._mlflow.active_run()
        if self.run_id is None and active is not None:
            self.run_id = active.info.run_id
        if self.run_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            where = found.experiment_id if found else None
            where = where or self._client.create_experiment(self._experiment)
            self.run_id, self._own = self._client.create_run(where).info.run_id, True
        for name, value in short_facts(facts).items():
            self._client.set_tag(self.run_id, _name(f"gradlift.{name}"), str(value))

    def close(self) -> None:
        if self._client is not None:
            self._send()
        if self._own:
            self._client.set_terminated(self.run_id)

    def _log(self, step: int, values: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        for name, value in values.items():
            self._waiting.append(self._mlflow.entities.Metric(_name(name), value, now, step))
        full = len(self._waiting) > _BATCH - len(values)
        if full or time.monotonic() - self._sent > _SECONDS:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting, self._sent = self._waiting, [], time.monotonic()
        if waiting:
            self._client.log_batch(self.run_id, metrics=waiting)


def _name(name: str) -> str:
    """MLflow takes letters, digits and a few signs in a name, which must be a path of no dots, and
    up to 250 characters.

    >>> _name("gradlift/../b:c/loss")
    'gradlift/__/b_c/loss'
    """
    parts = re.sub(r"[^\w\-./ ]", "_", name).split("/")
    named = ["_" * len(part) if part in ("", ".", "..") else part for part in parts]
    return "/".join(part or "_" for part in named)[:250]
