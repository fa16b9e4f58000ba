"""A scaler for trainers, which say `update()` after each optimizer and not once an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import MisuseError, SettingsError
from ..rules import Rule
from ..torch import GradScaler


class TrainerScaler(GradScaler):
    """`update()` waits as long as another optimizer has still to step with gradients of this scale.

    Else the second of two optimizers would divide its gradients by a scale they were not made with.
    It waits for the last of them, or for the next loss.

    >>> a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    >>> first, second = (torch.optim.SGD([p], lr=1.0) for p in (a, b))
    >>> scaler = TrainerScaler("cpu", "dynamic:init_scale=2^8")
    >>> scaler.optimizers = lambda: [first, second]
    >>> scaler.scale((a * 3e38 + b).sum()).backward()
    >>> scaler.step(first); scaler.update(); scaler.get_scale()
    256.0
    >>> scaler.step(second); scaler.update(); scaler.get_scale(), b.item()
    (128.0, -1.0)
    """

    def __init__(self, device: str, rule: Rule | str | float | None = None, **settings: Any):
        if settings.get("skip", "each") != "each":
            raise SettingsError(
                "skip='all' lets optimizers step in update(), which a trainer calls after each of "
                "them: leave skip out"
            )
        super().__init__(device, rule=rule, **settings)
        self.optimizers: Callable[[], Iterable[Any]] | None = None
        """All that may share a window; None: those that were seen in the first one."""
        self._stepped: set[int] = set()
        self._late = self._met = False

    def scale(self, outputs: Any, *, key: str | None = None) -> Any:
        where = outputs.device.type if isinstance(outputs, torch.Tensor) else self._device
        if where != self._device.split(":")[0]:
            raise MisuseError(
                f"this scaler was made for {self._device!r}, where autocast would be, but the loss "
                f"is on {where!r}: name that device instead"
            )
        self._close_window()
        return super().scale(outputs, key=key)

    def unscale_(self, optimizer: Any, *, key: str | None = None) -> None:
        if id(optimizer) not in self._stepped:  # a trainer may unscale all of them, before each
            super().unscale_(optimizer, key=key)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        value = super().step(optimizer, *args, **kwargs)
        self._stepped.add(id(optimizer))
        return value

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self._late = new_scale is None and self._others_wait()
        if not self._late:
            self._stepped.clear()
            super().update(new_scale)

    def _others_wait(self) -> bool:
        if self.optimizers is None and not self._met:
            return True
        seen = (ref() for ref in self._track(None).optimizers.values())
        return any(
            p.grad is not None
            for optimizer in (self.optimizers() if self.optimizers else filter(None, seen))
            if id(optimizer) not in self._stepped
            for group in optimizer.param_groups
            for p in group["params"]
        )

    def _close_window(self) -> None:
        """Carries out an update that had to wait."""
        if self._late:
            self._late, self._met = False, True
            self._stepped.clear()
            super().update()

    def state_dict(self) -> dict[str, Any]:
        self._close_window()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._late = False
        self._stepped.clear()

    def __getstate__(self) -> dict[str, Any]:
        self._close_window()
        return {**super().__getstate__(), "optimizers": None}


def scaler_for(precision: str, device: str, rule: Any, settings: Any) -> TrainerScaler | None:
    """The scaler that one of Lightning's precisions needs.

    >>> scaler_for("bf16-mixed", "cpu", None, {}) is None
    True
    """
    if precision == "16-mixed":
        return TrainerScaler(device, rule, **settings)
    given = [*settings, *(["rule"] if rule not in (None, "off") else [])]
    if given:
        raise SettingsError(
            f"precision={precision!r} has no scaler, so that {', '.join(given)} would do nothing: "
            "leave it out, or use '16-mixed'"
        )
    return None
