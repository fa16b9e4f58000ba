"""The losses between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mxnet import autograd, nd

from ..errors import MisuseError
from .finite_check import GluonLook


@dataclass
class GluonWindow:
    """What is known of the gradients that are being made; the scale does not move meanwhile."""

    losses: list[list[Any]] = field(default_factory=list)
    """For each micro-batch and each of its losses: their sum."""
    reduced: bool = False
    """The gradients have been added up over all devices and processes."""
    early: GluonLook | None = None
    """What `unscale` saw."""
    early_for_all: bool = False
    """It looked at reduced gradients."""

    def note(self, losses: list[Any]) -> None:
        """Asks MXNet about a micro-batch's losses; `read` waits for the answer."""
        with autograd.pause():
            self.losses.append([_total(loss) for loss in losses])

    def read(self) -> list[float]:
        """Each micro-batch's loss; it is finite if all of its float32 elements are, since the sum
        is taken in float64.

        >>> window = GluonWindow()
        >>> window.note([nd.array([1, 2]), nd.array([4])])
        >>> window.note([nd.array([1, float("inf")])])
        >>> window.read()
        [7.0, inf]
        """
        return [sum(float(total.asscalar()) for total in losses) for losses in self.losses]


def is_half(loss: Any) -> bool:
    return bool(loss.dtype == np.float16)


def lifted(loss: Any) -> Any:
    """A loss in float32 at least."""
    return loss if loss.dtype in (np.float32, np.float64) else loss.astype("float32")


def check(loss: Any) -> None:
    if not isinstance(loss, nd.NDArray):
        raise MisuseError(
            f"scale_loss() wants an array or a list of them, this is {type(loss).__name__}"
        )
    dtype = np.dtype(loss.dtype)
    if dtype.kind in "iub":
        raise MisuseError(f"scale_loss() wants a floating-point loss, this is {dtype}")


def _total(loss: Any) -> Any:
    """Their sum, still on its way."""
    x = loss.as_nd_ndarray() if hasattr(loss, "as_nd_ndarray") else loss
    return nd.sum(x.astype("float64"))
