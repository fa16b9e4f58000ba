"""TensorBoard: scalars of every step, exponent histograms of every sample, events as text."""

from __future__ import annotations

import os
import time
from typing import Any

from ..journal import Event
from ..text import visible
from .chart_sink import ChartSink, needed, short_facts


class TensorBoard(ChartSink):
    """Writes event files into `folder`, with the tensorboard package's own writer.

    A histogram counts exponents of a gradient as scaled: 2^e up to 2^(e+1) lies in bucket e.

    >>> import tempfile, os
    >>> from gradlift import Journal, Step
    >>> folder = tempfile.mkdtemp()
    >>> with Journal(os.path.join(folder, "journal.jsonl"), also=[TensorBoard(folder)]) as journal:
    ...     journal.step(Step(0, scale=8.0, next_scale=8.0, loss=0.25))
    >>> any(name.startswith("events.out") for name in os.listdir(folder))
    True
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._event, self._summary, self._tensor = (
            needed(f"tensorboard.compat.proto.{name}_pb2")
            for name in ("event", "summary", "tensor")
        )
        writer = needed("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(os.fspath(folder))

    def header(self, facts: dict[str, Any]) -> None:
        rows = [f"| {name} | {_cell(value)} |" for name, value in short_facts(facts).items()]
        self._add(0, [self._text("gradlift/run", "\n".join(["| fact | |", "|---|---|", *rows]))])

    def event(self, event: Event) -> None:
        detail = ", ".join(f"{name}: {value}" for name, value in event.detail.items())
        text = self._text("gradlift/events", f"**{_cell(event.what)}** {_cell(detail)}")
        self._add(self._step_of(event), [text])

    def close(self) -> None:
        self._writer.close()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        value = self._summary.Summary.Value
        kinds = {
            tag: "simple_value" if isinstance(v, float) else "histo" for tag, v in values.items()
        }
        self._add(step, [value(tag=tag, **{kinds[tag]: v}) for tag, v in values.items()])

    def _histogram(self, exponents: range, counts: list[int]) -> Any:
        return self._summary.HistogramProto(
            min=exponents[0],
            max=exponents.stop,
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
    return visible(str(value).replace("\n", " ")).replace("|", "\\|")
