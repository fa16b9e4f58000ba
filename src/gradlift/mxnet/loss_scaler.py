"""Scales of loops written by hand: MXNet's own `LossScaler`, and gluon-nlp's `DynamicLossScaler`.

    loss * scaler.loss_scale -> backward -> has_overflow -> trainer.step(n * loss_scale) or not
    -> update_scale

Nothing here touches a trainer; `init_trainer` does all of it, and better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mxnet import autograd

from ..core import LossScale, LossScaleOwner
from ..reading import Reading
from ..rules import Backoff, preset
from ..rules.base import LARGEST, SMALLEST
from .finite_check import Gradient, look


class DynamicLossScaler(LossScaleOwner):
    """gluon-nlp's: `tolerance` is the share of steps that may overflow before the scale falls.

    `has_overflow` looks at the gradients of every device, gluon-nlp's at the first one's.

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=2)
    >>> weight.initialize(mx.init.One())
    >>> trainer = mx.gluon.Trainer([weight], "sgd", {"learning_rate": 0.5})
    >>> scaler = DynamicLossScaler(init_scale=8, scale_window=1)
    >>> with mx.autograd.record():
    ...     loss = weight.data().sum() * scaler.loss_scale
    >>> loss.backward()
    >>> overflow = scaler.has_overflow([weight])
    >>> if not overflow:
    ...     trainer.step(1 * scaler.loss_scale)
    >>> scaler.update_scale(overflow)
    >>> weight.data().asnumpy().tolist(), scaler.loss_scale
    ([0.5, 0.5], 16.0)
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        tolerance: float = 0.01,
    ) -> None:
        self._loss_scale = LossScale(
            Backoff(
                init_scale=float(init_scale),
                growth_factor=float(scale_factor),
                backoff_factor=1 / float(scale_factor),
                growth_interval=scale_window,
                tolerance=tolerance,
                min_scale=SMALLEST,
                max_scale=LARGEST,
                powers_of_two=False,
            ),
            retries=False,
        )

    @property
    def loss_scale(self) -> float:
        """What the next loss is to be multiplied by, and `batch_size` of its step."""
        return self.get_scale()

    def has_overflow(self, params: Iterable[Any]) -> bool:
        """Is a gradient of these parameters not finite, on any device?"""
        return overflowed(params, self.get_scale())

    def update_scale(self, overflow: bool) -> None:
        """The step is over: moves the scale."""
        reading = Reading(nonfinite=bool(overflow), amax=math.inf if overflow else math.nan)
        self._loss_scale.finish(self._loss_scale.decide(reading, loss_known=False))


class GluonLossScaler(DynamicLossScaler):
    """MXNet's own `LossScaler`: its numbers, and its time: the scale moves in the next look.

    A loop that calls `update_scale` moves it at once, as MXNet's later releases do.

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=2)
    >>> weight.initialize()
    >>> weight.grad()[:] = float("inf")
    >>> scaler = GluonLossScaler()
    >>> scaler.has_overflow([weight]), scaler.loss_scale
    (True, 65536.0)
    >>> scaler.has_overflow([weight]), scaler.loss_scale
    (True, 32768.0)
    """

    def __init__(self) -> None:
        self._loss_scale = LossScale(preset("apex"), retries=False)  # the same numbers
        self._seen: bool | None = None

    def has_overflow(self, params: Iterable[Any]) -> bool:
        """Is a gradient of these parameters not finite, on any device?"""
        if self._seen is not None:
            self.update_scale(self._seen)
        self._seen = super().has_overflow(params)
        return self._seen

    def update_scale(self, overflow: bool) -> None:
        """The step is over: moves the scale."""
        self._seen = None
        super().update_scale(overflow)


def overflowed(params: Iterable[Any], scale: float) -> bool:
    """Is a gradient of these parameters not finite, or would it not be without the scale?"""
    found = [
        Gradient(param.name, data, grad)
        for param in params
        if param.grad_req != "null"
        for data, grad in zip(param.list_data(), param.list_grad(), strict=True)
    ]
    with autograd.pause():
        return bool(look(found, 1 / scale, amax=False).reading.nonfinite)
