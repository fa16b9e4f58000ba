"""`FP16_Optimizer`: an optimizer over float32 masters, with a loss scale of its own.

>>> import torch
>>> from gradlift.apex.fp16_utils import FP16_Optimizer, network_to_half
>>> model = network_to_half(torch.nn.Linear(2, 1))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)
>>> optimizer.zero_grad()
>>> optimizer.backward(model(torch.ones(1, 2)).sum())
>>> norm = optimizer.clip_master_grads(1.0)
>>> optimizer.step()
>>> optimizer.overflow, optimizer.loss_scale
(False, 128.0)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...core import Cause
from ...errors import MisuseError, StateError
from ...journal import JournalLike
from ...rules import Rule
from ...text import shown
from ...torch import MasterWeights
from ...torch.masters.saved_state import first_nonfinite
from ..opt_levels import scale_rule
from ..session import make_scaler
from .loss_scaler import dynamic_rule

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer:
    """An optimizer over float32 masters of float16 weights, with a loss scale of its own.

    | argument | meaning |
    |---|---|
    | `static_loss_scale` | a constant scale |
    | `dynamic_loss_scale` | apex's rule instead: from 2^32 down, up again after 1000 steps |
    | `dynamic_loss_args` | its `init_scale`, `scale_factor`, `scale_window` |
    | `rule`, `journal` | gradlift's: any rule instead, and a journal to record to |

    `.optimizer` is the `MasterWeights` inside, which schedulers take.

    >>> w = nn.Parameter(torch.ones(1).half())
    >>> optimizer = FP16_Optimizer(torch.optim.SGD([w], lr=1.0), dynamic_loss_scale=True,
    ...                            dynamic_loss_args={"init_scale": 2.0**20})
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     optimizer.backward((w.float() * 2**-4).sum())
    ...     optimizer.step()
    OVERFLOW! Skipping step. Attempted loss scale: 1048576.0, reducing to 524288.0
    >>> w.item()
    0.9375
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        *,
        rule: Rule | str | float | None = None,
        journal: JournalLike | None = None,
    ) -> None:
        self.optimizer = MasterWeights(init_optimizer)
        self.dynamic_loss_scale = dynamic_loss_scale
        self.verbose = verbose
        if rule is None and dynamic_loss_scale:
            rule = dynamic_rule(dynamic_loss_args or {})
        elif rule is None:
            rule = scale_rule(float(static_loss_scale))
        device = next((p.device.type for p in self._params()), "cpu")
        self.scaler = make_scaler(device, rule, journal)
        self._overflow = self._fresh = self._changed = self._in_closure = False

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # backward

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Gradients of model and masters."""
        self._forget()
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """`(loss * loss_scale).backward()`

        Several losses add up. The masters' gradients are made of the sum when they are first
        needed, so `update_master_grads` makes no difference.
        """
        seen = self.scaler.scale_of(None).windows
        if seen and self._changed:
            raise MisuseError(
                "backward() was called after clip_master_grads() or inspect_master_grad_data(): "
                "call these after the last backward() before step(), or zero_grad() in between"
            )
        seen.clear()  # what `overflow` saw is no longer all
        self._changed = False
        self.scaler.scale(loss).backward(retain_graph=retain_graph)
        self._fresh = True

    def update_master_grads(self) -> None:
        """Is done when the gradients are first needed: nothing is left to do."""

    @property
    def overflow(self) -> bool:
        """Are the gradients of the latest backward not finite?"""
        if self._fresh:
            found = self.scaler._check_inf_per_device(self.optimizer)
            self._overflow = any(bool(bad) for bad in found.values())
        return self._overflow

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the true gradients; returns their norm before, or -1 after an overflow.

        >>> w = nn.Parameter(torch.ones(2).half())
        >>> optimizer = FP16_Optimizer(torch.optim.SGD([w], lr=1.0), 8.0)
        >>> optimizer.backward((w * torch.tensor([3.0, 4.0])).sum())
        >>> optimizer.clip_master_grads(1.0)
        tensor(5.)
        """
        if self.overflow:
            return -1
        self._changed = True
        if norm_type == 2:
            return self.scaler.clip_grad_norm_(self.optimizer, max_norm)
        self._unscale("clip_master_grads with another norm_type than 2")
        return nn.utils.clip_grad_norm_(self.optimizer.masters, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The true float32 gradients, by group; None after an overflow."""
        if self.overflow:
            return None
        self._changed = True
        self._unscale("inspect_master_grad_data")
        masters = iter(self.optimizer.masters)
        return [[next(masters).grad for _ in group["params"]] for group in self.param_groups]

    def _unscale(self, what: str) -> None:
        if self._in_closure:
            raise MisuseError(f"{what} cannot be called in a closure: call it outside of step()")
        if self._fresh:
            self.scaler.unscale_(self.optimizer)

    def _forget(self) -> None:
        """There are no gradients any more that the scale is in."""
        self._fresh = self._changed = False
        self.scaler.scale_of(None).clear()

    # step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the masters and rounds them into the model, or skips after an overflow.

        `closure` calls `zero_grad` and `backward` on this object and returns the loss; after an
        overflow it is called again at the lower scale.
        """
        if closure is None:
            value = self.scaler.step(self.optimizer)
            self._ended("OVERFLOW!")
            return value
        self._in_closure = True
        try:
            while True:
                value = self.scaler.step(self.optimizer, closure)
                if self._ended("OVERFLOW within closure!"):
                    return value
        finally:
            self._in_closure = False

    def _ended(self, what: str) -> bool:
        """Moves the scale and prints a skip; False if another try may help."""
        result = self.scaler.result
        assert result is not None
        self.scaler.update()
        self._fresh = self._changed = False
        self._overflow = result.skipped
        if not self._overflow:
            return True
        scale = self.loss_scale
        if self.verbose:
            what = "LOSS IS NOT FINITE!" if result.cause is Cause.LOSS_NONFINITE else what
            becomes = "reducing to" if scale < result.scale else "keeping"
            print(
                f"{what} Skipping step. Attempted loss scale: {result.scale}, {becomes} {scale}",
                flush=True,
            )
        return scale >= result.scale

    # State

    @property
    def loss_scale(self) -> float:
        """May be set by hand, while no gradients have it in them."""
        return self.scaler.get_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._fresh:
            raise MisuseError(
                f"loss_scale was set to {value!r} between backward() and step(), but the gradients "
                f"have {self.loss_scale!r} in them: set it after step(), or after zero_grad()"
            )
        rule = self.scaler.rule
        if rule.min_scale == rule.max_scale:
            self.scaler.use_rule(scale_rule(float(value)))
        self.scaler.update(float(value))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """Scale, optimizer and masters.

        >>> w = nn.Parameter(torch.ones(1).half())
        >>> sorted(FP16_Optimizer(torch.optim.SGD([w], lr=1.0)).state_dict())
        ['dynamic_loss_scale', 'loss_scaler', 'optimizer_state_dict', 'overflow']
        """
        return {
            "loss_scaler": self.scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` or apex's own FP16_Optimizer saved; load the model first. Damage
        is refused and changes nothing."""
        if not isinstance(state_dict, dict):
            raise StateError(f"an FP16_Optimizer state is a dict: {shown(state_dict)}")
        for name in ("loss_scaler", "optimizer_state_dict"):
            if name not in state_dict:
                raise StateError(f"this FP16_Optimizer state lacks {name!r}")
        scaler, masters = state_dict["loss_scaler"], state_dict.get("fp32_from_fp16")
        if not isinstance(scaler, dict):
            scaler = {**self.scaler.state_dict(), **_of_apex(scaler)}
        if masters is not None:
            self._with_masters(masters)  # refused before anything is changed
        before = self.scaler.state_dict()
        self.scaler.load_state_dict(scaler)
        try:
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        except StateError:
            self.scaler.load_state_dict(before)
            raise
        if masters is not None:
            self.optimizer.refresh(self._with_masters(masters))
        self._overflow, self._fresh = state_dict.get("overflow") is True, False

    def _with_masters(self, saved: list[list[Tensor]]) -> list[Tensor]:
        """apex saves the float32 weights of each group's float16 ones."""
        weights, current = [], iter(self.optimizer.masters)
        groups = [[*filter(_is_half, group["params"])] for group in self.param_groups]
        if not isinstance(saved, list) or list(map(_length, saved)) != list(map(len, groups)):
            raise StateError("fp32_from_fp16 has other parameters than this optimizer")
        for p, master in zip((p for half in groups for p in half), chain.from_iterable(saved)):
            if not isinstance(master, Tensor) or master.shape != p.shape:
                raise StateError(f"a master in fp32_from_fp16 is {shown(master)}")
            if found := first_nonfinite(master):
                raise StateError(f"a master in fp32_from_fp16 is {found}: load an earlier file")
        for group, its in zip(self.param_groups, saved):
            left = iter(its)
            for p in group["params"]:
                master = next(current)
                weights.append(next(left).detach() if _is_half(p) else master)
        return weights


def _is_half(p: Tensor) -> bool:
    return p.dtype is torch.float16 and p.requires_grad


def _length(group: Any) -> int:
    return len(group) if isinstance(group, (list, tuple)) else -1


def _of_apex(saved: Any) -> dict[str, Any]:
    """apex pickles its scaler object; these are its attributes."""
    try:
        state = {"scale": float(saved.cur_scale), "_growth_tracker": 0}
        if hasattr(saved, "last_overflow_iter"):
            clean = saved.cur_iter - saved.last_overflow_iter - 1
            state["_growth_tracker"] = clean % int(saved.scale_window)
        return state
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(f"this loss_scaler is neither gradlift's nor apex's: {error}") from error
