"""`ScaleLogger`: what the scale does, beside Keras' own progress bar and in a journal."""

from __future__ import annotations

import math
import time
from typing import Any

import keras
from keras import ops

from ..errors import MisuseError, SettingsError
from ..journal import Journal
from ..verdict import Cause, Verdict
from ._optimizer import LossScaleOptimizer
from ._record import ROWS, Record, Values, culprits_of, line


class ScaleLogger(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows `loss_scale`, `skipped` (in this epoch) and `grad_norm`; keeps a journal of every step.

    It looks every `every` batches: by default at each, and on JAX at every 32nd, where a look makes
    the host wait for the device. The steps in between are not lost: the optimizer keeps the last
    64, and the journal gets them all. Limits given to the optimizer are enforced here.

    >>> import keras, numpy as np, tempfile, os
    >>> from gradlift import read_journal
    >>> from gradlift.keras import LossScaleOptimizer, ScaleLogger
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), rule="static:8"), "mse")
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> x = np.ones((8, 4), "float32")
    >>> told = model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[ScaleLogger(path)])
    >>> [step.scale for step in read_journal(path).steps], told.history["loss_scale"]
    ([8.0, 8.0, 8.0, 8.0], [8.0])
    """

    # Keras may call on_train_batch_end from another thread and go on training meanwhile; there
    # only plain numbers are touched. Looking is done before a batch begins.
    async_safe = True

    def __init__(self, journal: Any = None, every: int | None = None) -> None:
        super().__init__()
        if every is None:
            every = 32 if keras.backend.backend() == "jax" else 1
        if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= ROWS:
            raise SettingsError(f"every is {every!r}, expected a whole number from 1 to {ROWS}")
        self.every = every
        self._given = journal
        self._journal: Journal | None = None
        self._record: Record | None = None
        self._shown: dict[str, float] = {}
        self._described = False

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if not isinstance(optimizer, LossScaleOptimizer):
            raise MisuseError(
                f"ScaleLogger shows what gradlift.keras.LossScaleOptimizer does, and this model's "
                f"optimizer is {type(optimizer).__name__}: compile it with "
                "LossScaleOptimizer(optimizer, rule=...)"
            )
        self._optimizer = optimizer
        record = self._read()
        self._batch, self._seen, self._epoch_start = 0, record.steps, record.skipped
        self._since = time.perf_counter()
        if self._given is not None and self._journal is None:
            given = self._given
            self._journal = given if isinstance(given, Journal) else Journal(given)
            self._journal.describe(
                rule=str(optimizer.rule),
                framework="keras",
                backend=keras.backend.backend(),
                formats=["fp16"],
            )
            self._described = False
            self._describe(self._journal)
            if record.steps:
                self._journal.event("resume", record.steps)

    def _describe(self, journal: Journal) -> None:
        """Names the parameters, once the optimizer is built and knows them."""
        if not self._described and self._optimizer.built:
            self._described = True
            shapes = [v.shape for v in self._optimizer._trainable_variables]
            sizes = {n: math.prod(s) for n, s in zip(self._optimizer.names, shapes)}
            journal.describe(parameters=sizes)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_start = self._read().skipped

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._batch and self._batch % self.every == 0:
            self._look()
        self._batch += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._look()
        if logs is not None:
            logs.update(self._shown)

    def on_train_end(self, logs: Any = None) -> None:
        if self._journal is not None and self._journal is not self._given:
            self._journal.close()
            self._journal = None

    def _read(self) -> Record:
        """The optimizer's record. In JAX's `fit` its variables live outside of it meanwhile."""
        optimizer = self._optimizer
        outside = getattr(self.model, "_jax_state", None)
        values = outside and outside.get("optimizer_variables")
        if not values or not optimizer.built:
            return optimizer.record
        return Record(
            Values(*(ops.convert_to_numpy(values[optimizer._place(v)]) for v in optimizer._kept))
        )

    def _look(self) -> None:
        record = self._read()
        rows = record.rows(self._seen)
        if not rows:
            return
        last = rows[-1][1]
        self._shown = {
            "loss_scale": last.next_scale,
            "skipped": record.skipped - self._epoch_start,
        }
        if math.isfinite(last.norm):
            self._shown["grad_norm"] = last.norm
        if self._journal is not None:
            self._write(self._journal, rows)
        self._seen = record.steps
        self._optimizer.enforce(record)

    def _write(self, journal: Journal, rows: list[Any]) -> None:
        now = time.perf_counter()
        first = rows[0][0]
        seconds = (now - self._since) / (rows[-1][0] + 1 - self._seen)
        self._since = now
        if first > self._seen:
            missing = f"{first - self._seen} steps ran unseen: more than {ROWS} between two looks"
            journal.event("note", self._seen, text=missing)
        names = self._optimizer.names
        self._describe(journal)
        rate = _number(self._optimizer.learning_rate)
        for step, row in rows:
            told = line(step, row, names, rate, seconds)
            if told.verdict is Verdict.SKIP and told.cause is not Cause.NO_GRADIENTS:
                journal.event(
                    "skip",
                    step,
                    cause=told.cause.name,
                    scale=row.scale,
                    next_scale=row.next_scale,
                    culprits=[getattr(c, "described", c) for c in culprits_of(row, names)],
                )
            journal.step(told)


def _number(x: Any) -> float:
    """A learning rate as a number; NaN if it lies outside of its variable just now."""
    try:
        return float(ops.convert_to_numpy(x))
    except Exception:
        return math.nan
