"""Which losses and gradients belong together, as far as Python can tell."""

from __future__ import annotations

import weakref
from typing import Any

from ..errors import MisuseError


class Pairing:
    """The losses and unscaled gradients of one step, to refuse those that do not fit together.
    Inside a trace only its own are known."""

    def __init__(self) -> None:
        self._kind: str | None = None
        self._scaled: dict[int, Any] = {}
        self._true: dict[int, Any] = {}

    def add_loss(self, kind: str) -> None:
        """A loss of this type; what was unscaled before it is not of this step."""
        if self._kind is not None and "float16" in (kind, self._kind) and kind != self._kind:
            raise MisuseError(
                f"one step has a {self._kind} loss and a {kind} one, which carry different scales: "
                "compute both in float32"
            )
        self._kind, self._scaled, self._true = kind, {}, {}

    def add_unscaled(self, scaled: list[Any], true: list[Any]) -> None:
        # By weak reference: nothing is kept alive, and an id may be somebody else's later.
        changed = [pair for pair in zip(scaled, true) if pair[0] is not pair[1]]
        self._scaled, self._true = (
            {id(pair[i]): weakref.ref(pair[i]) for pair in changed} for i in (0, 1)
        )

    def check_scaled(self, grads: list[Any]) -> None:
        if any(_among(g, self._true) for g in grads):
            raise MisuseError(
                "get_unscaled_gradients() was given gradients that it has unscaled before: call "
                "it once a step"
            )

    def check_true(self, grads: list[Any]) -> None:
        if any(_among(g, self._scaled) for g in grads):
            raise MisuseError(
                "these gradients still carry the scale, though get_unscaled_gradients() was called "
                "on them: apply what it returned"
            )


def _among(g: Any, known: dict[int, Any]) -> bool:
    held = known.get(id(g))
    return held is not None and held() is g
