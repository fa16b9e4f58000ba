"""Whole files of numbers: CSV tables, transformers' trainer_state.json."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import IO, Any

from ..errors import LogError
from .formats import FileFormat
from .names import field_of
from .numbers import number, whole
from .row import Row
from .trainers import transformers

LARGEST_JSON = 2**28  # bytes: json needs the whole file in memory

CSV = FileFormat(
    "csv",
    "Lightning's metrics.csv, Keras' CSVLogger, DeepSpeed's csv_monitor, Weights & Biases' export",
    ("step or epoch", "loss, norm, lr, scale, skips: columns of known names"),
    ("columns whose names are the user's own", "the scale and skips, if there is no such column"),
)
STATE = FileFormat(
    "trainer_state",
    "transformers 4 and 5: trainer_state.json",
    ("step", "loss", "norm", "lr", "scale and skips (with gradlift's ScaleCallback)"),
    (
        "the loss of a single step: it is a mean of those since the last line",
        "losses that were not finite: logging_nan_inf_filter replaces them, often by 0.0",
        "the scale and skips, without ScaleCallback",
    ),
)


def looks_like_csv(line: str) -> bool:
    """Is this the header of a table with a column that is known?

    >>> looks_like_csv("epoch,step,train_loss"), looks_like_csv("iter 0: loss 4.2, time 97.01ms")
    (True, False)
    """
    if len(line) > 100_000:
        return False
    names = _cells(line, _separator(line))
    fields = [_column(name) for name in names]
    named = any(f in ("loss", "norm", "lr", "next_scale") for f in fields)
    return named and len(names) > 1 and not any(number(name) is not None for name in names)


def _separator(header: str) -> str:
    """Keras' CSVLogger takes any."""
    return max(",;\t", key=header.count)


def _cells(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return []


def _column(name: str) -> str | None:
    """Weights & Biases puts the run's name in front, and adds __MIN and __MAX."""
    if name.endswith(("__MIN", "__MAX")):
        return None
    return field_of(name.rpartition(" - ")[2])


class Table:
    """The rows of a CSV file, line by line. Cells may be empty.

    >>> table = Table("epoch,step,train_loss")
    >>> [(row.step, row.loss) for row in table.read("0,9,2.5")]
    [(9, 2.5)]
    """

    def __init__(self, header: str) -> None:
        self._columns: dict[str, list[int]] = {}
        self._separator = _separator(header)
        for i, name in enumerate(_cells(header, self._separator)):
            field = _column(name)
            if field:
                self._columns.setdefault(field, []).append(i)

    def read(self, line: str) -> Iterator[Row]:
        cells = _cells(line, self._separator)
        step = whole(self._first(cells, "step"))
        if step is None and "step" not in self._columns:
            step = whole(self._first(cells, "epoch"))
        loss, norm, lr, scale = (
            self._first(cells, field) for field in ("loss", "norm", "lr", "next_scale")
        )
        if step is None or loss is norm is lr is scale is None:
            return
        in_all = whole(self._first(cells, "skips_in_all"))
        yield Row("csv", step, loss, norm, lr, next_scale=scale, skips_in_all=in_all)

    def _first(self, cells: list[str], field: str) -> float | None:
        for i in self._columns.get(field, ()):
            if i < len(cells) and (value := number(cells[i])) is not None:
                return value
        return None


def trainer_state(file: IO[bytes], path: object) -> Iterator[Row]:
    """The log_history of a trainer_state.json."""
    text = file.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise LogError(f"{path} is a JSON file of more than {LARGEST_JSON >> 20} MiB, and not read")
    try:
        state: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LogError(f"cannot read {path}: it begins like JSON, and is damaged") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise LogError(f"{path} is JSON without a log_history, and no trainer_state.json")
    for entry in history:
        if isinstance(entry, dict):
            facts = {k: number(v) for k, v in entry.items() if isinstance(k, str)}
            row = transformers(facts, whole(entry.get("step")))
            if row is not None:
                yield row._replace(format="trainer_state")
