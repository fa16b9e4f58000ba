"""`ScaleLogger`: what the scale does, beside Keras' own progress bar and in a journal."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import keras

from ..core import Note
from ..errors import MisuseError, SettingsError, TrainingHalted
from ..journal import Channel, Journal, Recorder, current, opened
from .layer_looks import LayerLooks
from .loss_scale_optimizer import LossScaleOptimizer
from .step_record import ROWS, Record

_NO_GRAPH = Note(
    "forward",
    "the forward pass was not looked at: the model is neither Sequential nor Functional",
    once=True,
)


class ScaleLogger(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows `loss_scale`, `skipped` (in this epoch) and `grad_norm`; keeps a journal of every step.

    It looks every `every` batches: by default at each, and on JAX at every 32nd, where a look makes
    the host wait for the device. The steps in between are not lost: the optimizer keeps the last
    64, and the journal gets them all. Limits given to the optimizer are enforced here. A run that
    is being recorded around `fit` gets the lines too.

    On request, for `gradlift doctor`: every `sample` batches the weights and their update are
    recorded; with `forward`, a batch of inputs, also what each layer gives for it (without dropout;
    of Sequential and Functional models). Both wait for the device.

    >>> import keras, numpy as np, tempfile, os
    >>> from gradlift import read_journal
    >>> from gradlift.keras import LossScaleOptimizer, ScaleLogger
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), rule="static:8"), "mse")
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> x = np.ones((8, 4), "float32")
    >>> fitted = model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[ScaleLogger(path)])
    >>> [step.scale for step in read_journal(path).steps], fitted.history["loss_scale"]
    ([8.0, 8.0, 8.0, 8.0], [8.0])
    """

    # Keras may call on_train_batch_end from another thread and go on training meanwhile; there
    # only plain numbers are touched. Looking is done before a batch begins.
    async_safe = True

    def __init__(
        self,
        journal: Any = None,
        every: int | None = None,
        *,
        sample: int | None = None,
        forward: Any = None,
    ) -> None:
        super().__init__()
        if sample is None and forward is not None:
            sample = 50
        if sample is not None and (
            isinstance(sample, bool) or not isinstance(sample, int) or sample < 1
        ):
            raise SettingsError(f"sample is {sample!r}, expected a number of batches, 1 or more")
        self._sample, self._inputs = sample, forward
        self._looks: LayerLooks | None = None
        self._before: tuple[int, Any] | None = None
        self._batches = 0
        if every is None:
            every = 32 if keras.backend.backend() == "jax" else 1
        if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= ROWS:
            raise SettingsError(f"every is {every!r}, expected a whole number from 1 to {ROWS}")
        self.every = every
        self._given = journal
        self._optimizer: Any = None
        self._journal: Journal | None = None
        self._own: Channel | None = None
        self._shown: dict[str, float] = {}
        self.channels: list[Channel] = []

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if not isinstance(optimizer, LossScaleOptimizer):
            raise MisuseError(
                f"ScaleLogger shows what gradlift.keras.LossScaleOptimizer does, and this model's "
                f"optimizer is {type(optimizer).__name__}: compile it with "
                "LossScaleOptimizer(optimizer, rule=...)"
            )
        conclusions = optimizer._conclusions
        interrupted = optimizer is self._optimizer and self in conclusions.loggers
        if optimizer is not self._optimizer:
            self._close()
        self._optimizer = optimizer
        self.channels = [c for c in (self._own_channel(), self._run_channel()) if c is not None]
        optimizer._recorded = optimizer._recorded or bool(self.channels)  # before a trace
        # Loggers of another `fit`, which did not end, are dropped.
        others = [x for x in conclusions.loggers if x is not self and x.params is self.params]
        conclusions.loggers = [*others, self]
        if interrupted:
            with suppress(TrainingHalted), self._now():
                optimizer.enforce()
        if self._sample is not None and (
            self._looks is None or self._looks.model is not self._model
        ):
            self._looks = LayerLooks(self._model, self._inputs)
        self._before, self._batches = None, 0
        self._together = self.model.steps_per_execution
        self._ahead, self._begun = 0, False

    def _own_channel(self) -> Channel | None:
        """The channel to the journal that was given."""
        if self._own is None and self._given is not None:
            self._journal = opened(self._given)
            assert self._journal is not None
            self._own = Channel("keras", self._optimizer.rule, Recorder(self._journal))
            self._own.describe(backend=keras.backend.backend())
        return self._own

    def _run_channel(self) -> Channel | None:
        """The channel to the run that is recorded around `fit`: one an optimizer, since each is a
        scale there."""
        around, conclusions = current(), self._optimizer._conclusions
        if around is None:
            return None
        held: Channel | None = conclusions.run_channel
        if held is None or around not in held.recorders:
            held = conclusions.run_channel = Channel("keras", self._optimizer.rule, around)
            held.describe(backend=keras.backend.backend())
        return held

    def _close(self) -> None:
        """Closes a journal that was opened here."""
        if self._journal is not None and self._journal is not self._given:
            self._journal.close()
            self._journal = self._own = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        record = self._read()
        if not self._begun:  # not earlier: a callback may have put older weights there
            self._begun, self._seen = True, record.steps
            self._optimizer._conclusions.begin(record.steps)
        self._epoch_start = record.skipped
        if self._shown:
            self._shown = {**self._shown, "skipped": 0}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._ahead >= self.every or self._ahead + self._together > ROWS:
            self._look()
        self._ahead += self._together
        if self._looks is not None:
            self._look_inside(self._looks)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._look()
        if logs is not None:
            logs.update(self._shown)

    def _look_inside(self, looks: LayerLooks) -> None:
        """Before a batch: weights are kept before a sampled one, and compared after it."""
        if self._before is not None:
            (step, before), self._before = self._before, None
            facts = looks.updates(before, looks.weights())
            for recorder in self._recorders():
                recorder.weights(step, facts)
        if self._sample is not None and self._batches % self._sample == 0:
            self._before = self._read().steps, looks.weights()
            if self._inputs is not None and looks.has_graph:
                forward = looks.forward()
                for recorder in self._recorders():
                    recorder.forward(self._before[0], forward)
            elif self._inputs is not None:
                for channel in self.channels:
                    channel.note(None, _NO_GRAPH)
        self._batches += 1

    def _recorders(self) -> list[Recorder]:
        return [recorder for channel in self.channels for recorder in channel.recorders]

    def on_train_end(self, logs: Any = None) -> None:
        self._optimizer._conclusions.loggers.remove(self)
        self._close()

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

    def _look(self) -> None:
        """Reads the steps since the last look; shows the last, concludes all."""
        self._ahead = 0
        record = self._read()
        self._show(record)
        with self._now():
            self._optimizer.enforce(record)

    def _show(self, record: Record) -> None:
        rows = record.rows(min(self._seen, record.steps))
        self._seen = record.steps
        if not rows:
            return
        norms = [row.norm for _, row in rows if math.isfinite(row.norm)]
        self._shown = {
            **self._shown,
            "loss_scale": rows[-1][1].next_scale,
            "skipped": record.skipped - self._epoch_start,
            **({"grad_norm": norms[-1]} if norms else {}),
        }
