"""An optimizer between backward and step: gradients in true units, and whether they may be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Cause, StepResult
from ..errors import MisuseError
from ..journal import recorder
from ..torch import MasterWeights
from ..torch.gradient_source import gradients_of
from .session import AMP

_NAMES = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


@dataclass(eq=False)
class Overflow:
    """Gradients that must not be used; printed once, however many optimizers had them."""

    line: str

    def print(self) -> None:
        if self.line and AMP.verbosity > 0:
            print(self.line, flush=True)
        self.line = ""


@dataclass
class Pass:
    """A backward pass whose scale is still in the gradients: it goes on, or was delayed."""

    loss_id: int
    guards: list[Guard]
    open: bool = True


_passes: list[Pass] = []


class Aside(NamedTuple):
    """A gradient from before this backward pass."""

    param: Tensor
    grad: Tensor
    """What `.grad` was."""
    true: Tensor
    """Its value: in float32 where there is a master."""


class Guard:
    """Takes the place of an optimizer's `step` and `zero_grad`.

    Backward adds to `.grad`. What is there already has no scale any more, and this pass may have
    another than the last: so it is laid aside, and added to what this pass gave once that is
    unscaled.
    """

    def __init__(self, optimizer: Any, taken_over: Any = None) -> None:
        before = getattr(optimizer, "_amp_guard", None)
        self.optimizer, self._taken_over = optimizer, taken_over
        self._step = before._step if before else optimizer.step
        self._zero_grad = before._zero_grad if before else optimizer.zero_grad
        self.aside: list[Aside] = []
        self.overflows: list[Overflow] = []
        self._taking = self._begun = False
        optimizer._amp_guard = self
        optimizer.step, optimizer.zero_grad = self.step, self.zero_grad
        if taken_over is not None:  # a script may go on with the optimizer it had
            taken_over._amp_guard = self
            taken_over.param_groups = optimizer.param_groups
            for name in _NAMES:
                setattr(taken_over, name, getattr(optimizer, name))

    @property
    def passes(self) -> list[Pass]:
        """All of one loss."""
        return [each for each in _passes if self in each.guards]

    # Gradients of earlier passes

    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def weights(self) -> list[Tensor]:
        """What is stepped: float32 masters, where there are any."""
        return gradients_of(self.optimizer).weights()

    def lay_aside(self) -> None:
        if isinstance(self.optimizer, MasterWeights):
            self._adopt_loaded_weights()
        assert AMP.scaler is not None
        nothing = all(p.grad is None for p in self.params())
        if nothing or self.passes or not AMP.scaler.active:
            return
        if isinstance(self.optimizer, MasterWeights):
            gradients_of(
                self.optimizer
            ).find()  # what was exchanged or zeroed since is no longer held
        for p, weight in zip(self.params(), self.weights()):
            if (grad := p.grad) is None:
                continue
            true = grad if weight is p else weight.grad
            if true is None:
                true = grad.float()
            elif grad._is_view():  # of a bucket, where the next backward writes
                true = true.clone()
            self.aside.append(Aside(p, grad, true))
            p.grad = None

    def _adopt_loaded_weights(self) -> None:
        """Before the first pass a script may load a model's weights, as with apex."""
        if self._begun:
            return
        self._begun = True
        pairs = list(zip(self.params(), self.optimizer.masters))
        loaded = [p is not w and not torch.equal(w.to(p.dtype), p) for p, w in pairs]
        if any(loaded):
            self.optimizer.refresh(
                [p.detach().float() if new else w for (p, w), new in zip(pairs, loaded)]
            )

    def give_up(self) -> None:
        """The block was left by an exception: gradients are again what they were before it."""
        assert AMP.scaler is not None
        if not AMP.scaler.active:
            return
        for p in self.params():
            p.grad = None
        for p, grad, _ in self.aside:
            p.grad = grad
        self.aside = []

    def take(self, key: str | None) -> StepResult:
        """Checks this pass's gradients, takes the scale out and adds those of earlier passes."""
        scaler = AMP.scaler
        assert scaler is not None
        if isinstance(self.optimizer, MasterWeights):
            for p, *_ in self.aside:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)  # a master's gradient is held beside `.grad`
        self._taking = True
        try:
            scaler.unscale_(self.optimizer, key=key)
            scaler.step(self.optimizer, key=key)  # comes back to `step`, which waits for the user
        finally:
            self._taking = False
        result = scaler.result
        assert result is not None
        if self.aside:
            weights = dict(zip(self.params(), self.weights()))
            with torch.no_grad():
                for p, _, true in self.aside:
                    _add(weights[p], true)
        self.aside = []
        return result

    # The optimizer's own methods

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self._taking:
            return None
        if any(each.open for each in self.passes):
            raise MisuseError(
                "optimizer.step() was called inside the amp.scale_loss block, where gradients are "
                "still scaled: call it after the block"
            )
        if any(given is not None for given in (*args, kwargs.get("closure"))):
            raise MisuseError(
                "with amp an optimizer's step() takes no closure: use fp16_utils.FP16_Optimizer, "
                "or gradlift.torch.GradScaler.step(optimizer, closure)"
            )
        self.settle()
        for optimizer in filter(None, (self.optimizer, self._taken_over)):
            vars(optimizer)["_opt_called"] = True  # a skip is no fault of a schedule's order
        if self.overflows:
            for overflow in self.overflows:
                overflow.print()
            self.overflows = []
            return None
        recorder.depth += 1  # the scaler has recorded it
        try:
            return self._step(*args, **kwargs)
        finally:
            recorder.depth -= 1

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.aside, self.overflows = [], []
        for each in self.passes:
            if not each.open:
                each.guards.remove(self)
        _tidy()
        self._zero_grad(*args, **kwargs)

    def settle(self) -> None:
        """Ends what `delay_unscale` left open."""
        for each in self.passes[:1]:
            take(each.loss_id)


# Passes


def begin(loss_id: int, guards: list[Guard]) -> Pass:
    """Begins a backward pass for these optimizers."""
    if any(each.open for guard in guards for each in guard.passes):
        raise MisuseError(
            "amp.scale_loss was entered twice for the same optimizer: leave one block before the "
            "next, each with its own backward()"
        )
    params = [p for guard in guards for p in {*guard.params()}]
    if len({*params}) < len(params):
        raise MisuseError(
            "two of these optimizers have a parameter in common, whose gradient would be unscaled "
            "twice: call amp.scale_loss with one of them"
        )
    for guard in guards:
        if any(each.loss_id != loss_id for each in guard.passes):
            guard.settle()
        guard.lay_aside()
    begun = Pass(loss_id, guards)
    _passes.append(begun)
    return begun


def end(begun: Pass, *, delay: bool) -> None:
    """Ends it. A block around this one, of the same loss, has its scale in its gradients too."""
    begun.open = False
    around = any(each.open and each.loss_id == begun.loss_id for each in _passes)
    if not delay and not around:
        take(begun.loss_id)


def give_up(begun: Pass) -> None:
    """Ends it after an exception; what was delayed before it is lost too."""
    for guard in list(begun.guards):
        guard.give_up()
        for each in guard.passes:
            each.guards.remove(guard)
    _tidy()


def settle_all() -> None:
    """Before the scales change by hand."""
    for loss_id in {each.loss_id for each in _passes if not each.open}:
        take(loss_id)


def settle(loss_id: int) -> None:
    """Before this loss' scale changes by hand."""
    if any(each.loss_id == loss_id for each in _passes):
        take(loss_id)


def take(loss_id: int) -> None:
    """Unscales all that has this loss's scale, moves the scale, remembers an overflow."""
    scaler, key = AMP.scaler, AMP.key(loss_id)
    assert scaler is not None
    done = [each for each in _passes if each.loss_id == loss_id]
    if any(each.open for each in done):
        raise MisuseError(
            f"loss scaler {loss_id} is still used by an amp.scale_loss block around this call: "
            "leave that block first"
        )
    _passes[:] = [each for each in _passes if each.loss_id != loss_id]
    results = {}
    try:
        for guard in dict.fromkeys(guard for each in done for guard in each.guards):
            results[guard] = guard.take(key)
    finally:
        scaler.update()
    bad = {guard: result for guard, result in results.items() if result.skipped}
    AMP.overflows[loss_id] = bool(bad)
    if bad:
        overflow = Overflow(_line(loss_id, next(iter(bad.values())), scaler.get_scale(key)))
        hit = (guard for each in done if {*each.guards} & {*bad} for guard in each.guards)
        for guard in dict.fromkeys(hit):
            guard.overflows.append(overflow)


def _tidy() -> None:
    """Forgets passes whose gradients were never used, and whether their losses were finite."""
    left = {each.loss_id for each in _passes if each.guards}
    for each in _passes:
        if each.loss_id not in left and AMP.scaler is not None:
            AMP.scaler.scale_of(AMP.key(each.loss_id)).clear()
    _passes[:] = [each for each in _passes if each.guards]


def _line(loss_id: int, result: StepResult, scale: float) -> str:
    """apex's words where apex would be right."""
    loss = result.cause is Cause.LOSS_NONFINITE
    what = "Loss is not finite" if loss else "Gradient overflow"
    becomes = "reducing loss scale to" if scale < result.scale else "keeping loss scale"
    return f"{what}.  Skipping step, loss scaler {loss_id} {becomes} {scale}"


def guard_of(optimizer: Any) -> Guard:
    guard = getattr(optimizer, "_amp_guard", None)
    if guard is None:
        raise MisuseError(
            f"this {type(optimizer).__name__} did not go through amp.initialize: pass it there "
            "with the others, in a list"
        )
    return guard


def _add(weight: Tensor, true: Tensor) -> None:
    fresh = weight.grad
    if fresh is None:
        weight.grad = true
    elif fresh.is_sparse and not true.is_sparse:
        weight.grad = true.add_(fresh)
    else:
        fresh.add_(true)
