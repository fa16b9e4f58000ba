"""Watches any script's optimizers and changes nothing: what are its gradients like?"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..journal import Journal, Step
from ..verdict import Cause, Verdict
from ._inspect import dense, look
from ._names import culprits, name_apart, name_of
from ._statistics import describe


def profile(journal: Journal, *, every: int) -> Callable[[], None]:
    """Records each optimizer step from now on; every `every` steps, each parameter's gradient."""
    watcher = Watcher(journal, every)
    register_optimizer_step_pre_hook(watcher.before_step)
    _watch_scaler(watcher)
    _watch_backward(watcher)
    _watch_clipping(watcher)
    return lambda: None


class Watcher:
    """What is known between a backward pass and the step that uses it."""

    def __init__(self, journal: Journal, every: int) -> None:
        self.journal, self.every = journal, every
        self.names: dict[int, str] = {}
        self.taken: dict[str, int] = {}
        self.steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.scale = 1.0
        self.loss: Tensor | None = None
        self.clipped: Any = 1.0
        """What the script's clipping has multiplied its gradients with, since the last step."""
        self.stepped = self.failed = False
        self.since = time.perf_counter()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called by torch before the step of any optimizer."""
        self.stepped = True
        skipped = _on_cpu(getattr(optimizer, "found_inf", None)) == 1.0
        folded = getattr(optimizer, "grad_scale", None) is not None
        self.watch(optimizer, skipped=skipped, carried=folded)

    def watch(self, optimizer: Any, *, skipped: bool, carried: bool) -> None:
        """Records a step; whatever a watcher does not understand is not the script's trouble."""
        try:
            self.record(optimizer, skipped=skipped, carried=carried)
        except Exception as error:
            if not self.failed:
                self.failed = True
                self.journal.event("note", text=f"could not look at a step: {error!r:.200}")

    def record(self, optimizer: Any, *, skipped: bool, carried: bool) -> None:
        n = self.steps.get(optimizer, 0)
        self.steps[optimizer] = n + 1
        number = self.numbers.setdefault(optimizer, len(self.numbers) + 1)
        key = "" if number == 1 else f"optimizer {number}"
        seen: dict[str, Any] = {}
        if n % self.every == 0 or skipped:
            seen = self.look(optimizer, n, carried, skipped)
        if skipped:
            facts = {"cause": Cause.UNKNOWN_NONFINITE.name, "scale": self.scale}
            blamed = [c.described for c in seen.get("culprits", ())]
            self.journal.event("skip", n, **facts, culprits=blamed, **({"key": key} if key else {}))
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        group = optimizer.param_groups[0] if optimizer.param_groups else {}
        self.journal.step(
            Step(
                n,
                self.scale,
                self.scale,
                lr=float(group.get("lr", math.nan)),
                verdict=Verdict.SKIP if skipped else Verdict.APPLY,
                cause=Cause.UNKNOWN_NONFINITE if skipped else Cause.NONE,
                seconds=seconds,
                key=key,
                **seen,
            )
        )
        self.loss, self.clipped = None, 1.0

    def look(self, optimizer: Any, n: int, carried: bool, skipped: bool) -> dict[str, Any]:
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not params:
            return {}
        first = not self.names
        if id(params[0]) not in self.taken.values():
            name_apart(params, self.names, self.taken)
        if first:
            self.journal.describe(
                framework="torch",
                formats=["fp16"],
                parameters={name_of(p, self.names): p.numel() for p in params},
            )
        grads = [_real(dense(p.grad)) for p in params if p.grad is not None]
        times = (1.0 if carried else self.scale) / float(self.clipped)
        seen = look(grads, 1.0, amax=True)
        shares = {name_of(p, self.names): describe(g * times) for p, g in zip(params, grads)}
        self.journal.sample(n, shares)
        facts = {
            "amax": seen.amax * times,
            "nonfinite": bool(seen.nonfinite),
            "norm": seen.norm * times / self.scale,
            "loss": math.nan if self.loss is None else float(self.loss.detach().float().sum()),
        }
        if skipped:
            facts["culprits"] = culprits(params, self.names)
        return facts


def _real(g: Tensor) -> Tensor:
    return torch.view_as_real(g) if g.is_complex() else g


def _on_cpu(x: Any) -> float | None:
    """A tensor's value, if reading it does not mean waiting for a device."""
    return x.item() if isinstance(x, Tensor) and x.device.type == "cpu" else None


def _watch_scaler(watcher: Watcher) -> None:
    """torch's scaler, looked at while it works: which scale, and was the step left out?"""
    kind = torch.amp.GradScaler
    scale, step = kind.scale, kind.step

    def watched_scale(self: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            watcher.loss = outputs.detach()
        scaled = scale(self, outputs)
        now = _on_cpu(self._get_scale_async()) if self.is_enabled() else 1.0
        watcher.scale = now or watcher.scale
        return scaled

    def watched_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        watcher.stepped = False
        result = step(self, optimizer, *args, **kwargs)
        if not watcher.stepped and self.is_enabled():
            watcher.watch(optimizer, skipped=True, carried=False)
        return result

    kind.scale, kind.step = watched_scale, watched_step  # type: ignore[method-assign]


def _watch_backward(watcher: Watcher) -> None:
    backward = Tensor.backward

    def watched(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if watcher.loss is None:
            watcher.loss = self.detach()
        return backward(self, *args, **kwargs)

    Tensor.backward = watched  # type: ignore[method-assign]


def _watch_clipping(watcher: Watcher) -> None:
    """Gradients are looked at before a step, and were to be seen as backward left them."""
    home = torch.nn.utils.clip_grad
    clip = home.clip_grad_norm_

    @functools.wraps(clip)
    def watched(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        norm = clip(parameters, max_norm, *args, **kwargs)
        factor = (float(max_norm) / (norm.detach() + 1e-6)).clamp(max=1.0)
        # By a norm of inf everything became 0 or NaN: there is nothing to take out again.
        watcher.clipped = torch.where(factor > 0, factor, 1.0)
        return norm

    for module in (home, torch.nn.utils):
        module.clip_grad_norm_ = watched  # type: ignore[attr-defined]
