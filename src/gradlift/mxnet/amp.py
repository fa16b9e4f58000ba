"""The three names of `mxnet.contrib.amp`, called as MXNet's own are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mxnet.gluon import Trainer

from ..core import Limits
from ..errors import MisuseError
from ..journal import JournalLike
from ..rules import Rule
from .scaler import Scaler


def init_trainer(
    trainer: Any,
    rule: Rule | str | float = "mxnet",
    *,
    max_norm: float | None = None,
    max_consecutive_skips: int | None = None,
    on_floor: str = "hold",
    journal: JournalLike | None = None,
) -> Scaler:
    """Gives a Gluon trainer a loss scale: from now on its steps are checked, and bad ones skipped.

    | argument | meaning |
    |---|---|
    | `rule` | a rule, or its text; by default MXNet's own, change for change |
    | `max_norm` | clips what the optimizer gets (no scale, divided by `batch_size`), at no cost |
    | `on_floor`, `max_consecutive_skips` | when to stop a run that only skips |
    | `journal` | a `gradlift.Journal`, or its path, to record to |

    The `Scaler` that is returned has the result of each step. Its state is saved and loaded
    with the trainer's, by `save_states` and `load_states`.

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=2)
    >>> weight.initialize()
    >>> trainer = mx.gluon.Trainer([weight], "adam")
    >>> scaler = init_trainer(trainer, "dynamic:growth_interval=500", max_norm=1.0)
    >>> scaler.get_scale(), scaler.result
    (65536.0, None)
    """
    if not isinstance(trainer, Trainer):
        raise MisuseError(
            f"init_trainer() wants a gluon.Trainer, this is {type(trainer).__name__}: an optimizer "
            "alone sees no loss"
        )
    if hasattr(trainer, "_gradlift_scaler"):
        raise MisuseError(
            "init_trainer() was called before on this trainer: call it once, right after the "
            "trainer is made, and keep what it returns"
        )
    limits = Limits(max_consecutive_skips, on_floor)
    scaler = trainer._gradlift_scaler = Scaler(trainer, rule, limits, max_norm, journal)
    return scaler


init_loss_scaling = init_trainer
"""The same under the name that some articles give."""


@contextmanager
def scale_loss(loss: Any, trainer: Any) -> Iterator[Any]:
    """loss * scale, in float32; a list of losses (one a device) gives a list.

    Called again before `trainer.step` it scales another micro-batch of the same window, for
    parameters whose `grad_req` is "add".

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=2)
    >>> weight.initialize(mx.init.One())
    >>> trainer = mx.gluon.Trainer([weight], "sgd")
    >>> scaler = init_trainer(trainer, "static:8")
    >>> with mx.autograd.record():
    ...     loss = weight.data().sum()
    ...     with scale_loss(loss, trainer) as scaled:
    ...         scaled.backward()
    >>> scaled.asscalar(), weight.grad().asnumpy().tolist()
    (16.0, [8.0, 8.0])
    """
    yield _scaler_of(trainer, "scale_loss()")._scaled(loss)


def unscale(trainer: Any) -> None:
    """Takes the scale out of the gradients, so that they can be looked at or clipped by hand.

    On several devices call `trainer.allreduce_grads()` before it and `trainer.update(batch_size)`
    after it. Calling it again before the step does nothing. `init_trainer(max_norm=...)` is faster.

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=2)
    >>> weight.initialize(mx.init.One())
    >>> trainer = mx.gluon.Trainer([weight], "sgd", {"learning_rate": 1.0})
    >>> scaler = init_trainer(trainer, "static:8")
    >>> with mx.autograd.record(), scale_loss(3 * weight.data().sum(), trainer) as scaled:
    ...     scaled.backward()
    >>> unscale(trainer)
    >>> weight.grad().asnumpy().tolist()
    [3.0, 3.0]
    >>> trainer.step(1)
    >>> weight.data().asnumpy().tolist()
    [-2.0, -2.0]
    """
    _scaler_of(trainer, "unscale()")._unscale()


def _scaler_of(trainer: Any, call: str) -> Scaler:
    scaler: Scaler | None = getattr(trainer, "_gradlift_scaler", None)
    if scaler is None:
        raise MisuseError(
            f"{call} was given a {type(trainer).__name__} without a loss scale: call "
            "gradlift.mxnet.init_trainer(trainer) first, once, right after the trainer is made"
        )
    return scaler
