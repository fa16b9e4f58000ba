"""TensorBoard: scalars of every step, exponent histograms of every sample, events as text."""

from __future__ import annotations

import os
import time
from typing import Any

from ..errors import GradliftError
from ..journal import Event, Sample, Step
from ._scalars import Scalars, bins, short_facts, worst_shares


class TensorBoard:
    """Writes event files into `folder`, with the tensorboard package's own writer.

    A histogram counts exponents of a gradient as scaled: 2^e up to 2^(e+1) lies in bucket e.

    >>> import tempfile, os
    >>> from gradlift import Journal
    >>> folder = tempfile.mkdtemp()
    >>> with Journal(os.path.join(folder, "journal.jsonl"), also=[TensorBoard(folder)]) as journal:
    ...     journal.step(Step(0, scale=8.0, next_scale=8.0, loss=0.25))
    >>> any(name.startswith("events.out") for name in os.listdir(folder))
    True
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto import (  # type: ignore[import-untyped]
                event_pb2,
                summary_pb2,
                tensor_pb2,
            )
            from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
                EventFileWriter,
            )
        except ImportError as error:
            raise GradliftError(
                f"the TensorBoard sink needs tensorboard ({error}): pip install tensorboard"
            ) from None
        self._event, self._summary, self._tensor = event_pb2, summary_pb2, tensor_pb2
        self._writer = EventFileWriter(os.fspath(folder))
        self._scalars = Scalars()
        self._last = 0

    def header(self, facts: dict[str, Any]) -> None:
        rows = [f"| {name} | {_cell(value)} |" for name, value in short_facts(facts).items()]
        self._add(0, [self._text("gradlift/run", "\n".join(["| fact | |", "|---|---|", *rows]))])

    def step(self, step: Step) -> None:
        self._last = step.step
        self._add(step.step, self._simple(self._scalars.of(step)))

    def event(self, event: Event) -> None:
        told = ", ".join(f"{name}: {value}" for name, value in event.detail.items())
        at = self._last if event.step is None else event.step
        self._add(at, [self._text("gradlift/events", f"**{event.what}** {_cell(told)}")])

    def sample(self, sample: Sample) -> None:
        values = self._simple(worst_shares(sample))
        for name, shares in sample.parameters.items():
            exponents, counts = bins(shares)
            if exponents:
                tag = f"gradlift/exponents/{name}"
                values.append(
                    self._summary.Summary.Value(tag=tag, histo=self._histogram(exponents, counts))
                )
        self._add(sample.step, values)

    def close(self) -> None:
        self._writer.close()

    def _simple(self, numbers: dict[str, float]) -> list[Any]:
        value = self._summary.Summary.Value
        return [value(tag=tag, simple_value=number) for tag, number in numbers.items()]

    def _histogram(self, exponents: list[int], counts: list[int]) -> Any:
        return self._summary.HistogramProto(
            min=exponents[0],
            max=exponents[-1] + 1,
            num=sum(counts),
            sum=sum(e * n for e, n in zip(exponents, counts)),
            sum_squares=sum(e * e * n for e, n in zip(exponents, counts)),
            bucket_limit=[exponents[0], *(e + 1 for e in exponents)],  # their upper ends
            bucket=[0, *counts],
        )

    def _text(self, tag: str, text: str) -> Any:
        kind = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        return self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=kind),
            tensor=self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()]),
        )

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))


def _cell(value: Any) -> str:
    """Text that cannot end a cell of a table."""
    return str(value).replace("|", "\\|").replace("\n", " ")
