"""`ScaleLogger`: what the scale does, beside Keras' own progress bar and in a journal."""

from __future__ import annotations

import math
import time
from typing import Any

import keras
from keras import ops

from ..errors import MisuseError, SettingsError, TrainingHalted
from ..journal import Journal, opened
from ..verdict import Cause, Verdict
from ._optimizer import LossScaleOptimizer
from ._record import ROWS, Record, line


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
        self._optimizer: Any = None
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
        if self._journal is not None and optimizer is self._optimizer:
            self._take(self._read())  # of a run that was interrupted
        self._optimizer = optimizer
        optimizer._witness = self._halted
        optimizer._recorded = optimizer._recorded or self._given is not None  # before a trace
        self._together = self.model.steps_per_execution
        self._ahead, self._begun = 0, False
        if self._given is not None and self._journal is None:
            journal = self._journal = opened(self._given)
            assert journal is not None
            journal.describe(
                rule=str(optimizer.rule),
                framework="keras",
                backend=keras.backend.backend(),
                formats=_formats(self.model),
            )
            self._described = False
            self._describe(journal)

    def _describe(self, journal: Journal) -> None:
        """Names the parameters, once the optimizer is built and knows them."""
        if not self._described and self._optimizer.built:
            self._described = True
            shapes = [v.shape for v in self._optimizer._trainable_variables]
            sizes = {n: math.prod(s) for n, s in zip(self._optimizer.names, shapes)}
            journal.describe(parameters=sizes)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        record = self._read()
        if not self._begun:  # not earlier: a callback may have put older weights there
            self._begun, self._seen = True, record.steps
        self._epoch_start, self._since = record.skipped, time.perf_counter()
        if self._shown:
            self._shown = {**self._shown, "skipped": 0}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._ahead >= self.every or self._ahead + self._together > ROWS:
            self._look()
        self._ahead += self._together

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._look()
        if logs is not None:
            logs.update(self._shown)

    def on_train_end(self, logs: Any = None) -> None:
        self._optimizer._witness = None
        if self._journal is not None and self._journal is not self._given:
            self._journal.close()
            self._journal = None

    def _now(self) -> keras.StatelessScope:
        """Where the optimizer's variables have their values: in JAX's `fit` these live outside.

        `self.model` would put them back, at every look, and make the next step start anew.
        """
        model = self._model
        outside = None if getattr(model, "_jax_state_synced", True) else model._jax_state
        values = outside["optimizer_variables"] if outside else []
        return keras.StatelessScope(state_mapping=list(zip(self._optimizer.variables, values)))

    def _read(self) -> Record:
        with self._now():
            return self._optimizer.record

    def _rate(self) -> float:
        with self._now():
            try:
                return float(ops.convert_to_numpy(self._optimizer.learning_rate))
            except AttributeError:  # a MultiOptimizer has several
                return math.nan

    def _look(self) -> None:
        record, since = self._read(), self._seen
        self._take(record)
        try:
            self._optimizer.enforce(record, since)
        except TrainingHalted as why:
            self._halted(why)
            raise

    def _halted(self, why: TrainingHalted) -> None:
        """The steps that led to it are journaled: no callback will be called any more."""
        self._take(self._read())
        if self._journal is not None:
            self._journal.event("note", self._seen - 1, text=str(why))

    def _take(self, record: Record) -> None:
        self._ahead = 0
        if record.steps < self._seen:
            if self._journal is not None:
                text = f"back at step {record.steps}: an older state was loaded"
                self._journal.event("note", self._seen, text=text)
            self._seen = record.steps
        rows = record.rows(self._seen)
        if not rows:
            return
        last = rows[-1][1]
        shown = {"loss_scale": last.next_scale, "skipped": record.skipped - self._epoch_start}
        norms = [row.norm for _, row in rows if math.isfinite(row.norm)]
        self._shown = {**self._shown, **shown, **({"grad_norm": norms[-1]} if norms else {})}
        if self._journal is not None:
            self._write(self._journal, rows)
        self._seen = record.steps

    def _write(self, journal: Journal, rows: list[Any]) -> None:
        now = time.perf_counter()
        first = rows[0][0]
        seconds = (now - self._since) / (rows[-1][0] + 1 - self._seen)
        self._since = now
        self._describe(journal)
        if first > self._seen:
            missing = f"{first - self._seen} steps ran unseen: more than {ROWS} between two looks"
            journal.event("note", self._seen, text=missing)
        names = self._optimizer.names
        rate = self._rate()
        for step, row in rows:
            told = line(step, row, names, rate, seconds)
            if told.verdict is Verdict.SKIP and told.cause is not Cause.NO_GRADIENTS:
                journal.event(
                    "skip",
                    step,
                    cause=told.cause.name,
                    scale=row.scale,
                    next_scale=row.next_scale,
                    culprits=[getattr(c, "described", c) for c in told.culprits],
                )
            journal.step(told)


def _formats(model: Any) -> list[str]:
    """What the layers compute in."""
    kinds = {layer.compute_dtype for layer in model._flatten_layers()}
    names = {"float16": "fp16", "bfloat16": "bf16"}
    return [name for kind, name in names.items() if kind in kinds] or ["fp32"]
