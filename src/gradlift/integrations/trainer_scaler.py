"""A scaler for trainers, which say `update()` after each optimizer and not once an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MisuseError, SettingsError
from ..rules import Rule
from ..torch import GradScaler
from ..torch.ranks.sharding import distributed


class TrainerScaler(GradScaler):
    """`update()` waits as long as another optimizer has still to step with gradients of this scale.

    Else the second of two optimizers would divide its gradients by a scale they were not made with.
    It waits for the last of them, or for the next loss. Of several processes the first keeps the
    journal: each of them makes the trainer, and so a scaler with the same journal.

    >>> a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    >>> first, second = (torch.optim.SGD([p], lr=1.0) for p in (a, b))
    >>> scaler = TrainerScaler("cpu", "dynamic:init_scale=2^8")
    >>> scaler.parameters = lambda: [a, b]
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
        self.parameters: Callable[[], Iterable[torch.Tensor]] | None = None
        """All that may share a window; None: unknown, so that the next loss ends it."""
        self._done: list[Any] = []
        self._late = False

    def scale(self, outputs: Any, *, key: str | None = None) -> Any:
        where = outputs.device.type if isinstance(outputs, torch.Tensor) else self._device
        if where != self._device.split(":")[0]:
            raise MisuseError(
                f"this scaler was made for {self._device!r}, where autocast would be, but the loss "
                f"is on {where!r}: name that device instead"
            )
        if distributed() and dist.get_rank() > 0:
            self._settings.stop_recording()
        self._close_window()
        return super().scale(outputs, key=key)

    def unscale_(self, optimizer: Any, *, key: str | None = None) -> None:
        if optimizer not in self._done:  # a trainer may unscale all of them, before each
            super().unscale_(optimizer, key=key)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer in self._done:  # once more, without a loss
            before = self.get_scale()
            self._close_window()
            # Gradients that wait for another optimizer's step may carry it still.
            self._settings.by_hand = self.get_scale() == before
        value = super().step(optimizer, *args, **kwargs)
        self._done.append(optimizer)
        return value

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self._late = new_scale is None and self._others_wait()
        if not self._late:
            self._done.clear()
            super().update(new_scale)

    def _others_wait(self) -> bool:
        if self.parameters is None:
            return True
        done = set(map(id, parameters_of(self._done)))
        return any(p.grad is not None and id(p) not in done for p in self.parameters())

    def _close_window(self) -> None:
        """Carries out an update that had to wait."""
        if self._late:
            self._late = False
            self._done.clear()
            super().update()

    def flush(self) -> None:
        """At the end of training, when no loss will come."""
        self._close_window()
        super().flush()

    def state_dict(self) -> dict[str, Any]:
        self._close_window()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._late = False
        self._done.clear()

    def __getstate__(self) -> dict[str, Any]:
        self._close_window()
        return {**super().__getstate__(), "parameters": None}


def parameters_of(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Of all their groups."""
    return (p for o in optimizers for group in o.param_groups for p in group["params"])


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
