"""Where an optimizer's gradients are, and how it is stepped with them.

`GradScaler` asks a `GradientSource` and never which optimizer it has:

    find() -> params, held, elements     `.grad` of each parameter, and the tensors to look at
    note(), changed()                    was a `.grad` replaced or written to in between?
    each()                               one gradient a parameter
    multiply(factor)                     now, in place
    step(grad_scale, found_inf)          divided inside the optimizer's own kernel
    multiplied_step(factor)              multiplied before the step; the verdict is known
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ..errors import MisuseError, SettingsError, warn
from ..journal import recorder
from .names import name_of
from .ranks.sharding import brought_home, is_dtensor, local

Found = tuple[list[Tensor], list[Tensor], list[Tensor]]


class GradientSource:
    """One optimizer's gradients in one window; keeps what `find` has found."""

    gathered = False
    """Are gradients looked at in copies that lie together? Then no parameter can be left out of
    `elements`, and `find` must be called again after a gradient was changed by hand."""
    half_way = (
        "Some weights may have moved and others not, since torch has no copy to put back: those "
        "that moved will move twice."
    )
    """What a step that raised leaves behind."""
    divides_by_numbers = False
    """May `grad_scale` be a Python number? Else it is a tensor."""
    reads_both = False
    """Does the step want `grad_scale` and `found_inf` also where nothing is to be done?"""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.params: list[Tensor] = []
        """Those that have a gradient."""
        self.held: list[Tensor] = []
        """`.grad` of each when it was looked at."""
        self.elements: list[Tensor] = []
        """Tensors that hold all elements, to look at."""
        self.hooked: bool | None = None
        """Has the optimizer hooks that may change gradients? None: nobody has looked."""
        self.after_hooks: Callable[[], None] | None = None
        """Called inside the optimizer's step, after the hooks of others."""
        self.noted: dict[int, int] | None = None
        """id -> version of each gradient when `note` was called."""

    def find(self, *, by_parameter: bool = False, spread: bool = False) -> Found:
        """Finds all gradients; `by_parameter`: one tensor to look at for each parameter. `spread`:
        they may be spread over ranks."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Before the first step: MisuseError if the optimizer cannot work on these parameters."""

    def each(self) -> list[Tensor]:
        """The elements of each parameter's gradient, as the step will use them."""
        raise NotImplementedError

    def note(self) -> None:
        """The caller goes on with gradients that were looked at: from now on changes count."""
        self.noted = self._stamps()

    def changed(self) -> bool:
        """Was a gradient replaced, written to, or put where there was none since `note`? What is
        written through `.data` or a NumPy view leaves no trace."""
        return self.noted != self._stamps()

    def changed_at(self, noted: dict[int, int] | None) -> list[int]:
        """After `find`: positions of the gradients that are not as they were `noted`."""
        noted = noted or {}
        return [i for i, g in enumerate(self.held) if noted.get(id(g)) != _version(g)]

    def marks(self) -> list[tuple[Tensor, int]]:
        """Each gradient with its version: equal to those of later only if none has changed."""
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        return [(g, _version(g)) for g in (p.grad for p in params) if g is not None]

    def _stamps(self) -> dict[int, int]:
        """`held` keeps the noted gradients alive, so no other tensor can have their ids."""
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        grads = (p.grad for p in params)
        return {
            id(g): g._version if type(g) is Tensor else _version(g) for g in grads if g is not None
        }

    def multiply(self, factor: float | Tensor) -> None:
        """Gradients x factor, now; `elements` are then the results."""
        raise NotImplementedError

    @property
    def folds(self) -> bool:
        """Does the optimizer's step take `grad_scale` and `found_inf`?"""
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    @property
    def must_know(self) -> bool:
        """Is the verdict needed before the step? Fused SGD leaves its momentum uninitialised if
        its very first step is skipped on a device."""
        inner = self._stepped()
        return (
            isinstance(inner, torch.optim.SGD)
            and not inner.state
            and any(group["momentum"] for group in self.optimizer.param_groups)
        )

    def _stepped(self) -> Any:
        """The optimizer whose kernel runs."""
        return self.optimizer

    def step(
        self,
        grad_scale: float | Tensor,
        found_inf: Tensor | None,
        *args: Any,
        just_read: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The optimizer's step, which divides by `grad_scale` and does nothing where `found_inf`
        is 1. `just_read`: `find` was called since anybody could change a gradient."""
        optimizer = self.optimizer
        theirs = getattr(optimizer, "grad_scale", None)
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            if not isinstance(grad_scale, Tensor) and not self.divides_by_numbers:
                grad_scale = torch.tensor(grad_scale, dtype=torch.float32)
            optimizer.grad_scale = grad_scale if theirs is None else grad_scale * theirs
        elif self.reads_both:
            optimizer.grad_scale = torch.ones(()) if theirs is None else theirs
        if found_inf is not None:
            optimizer.found_inf = found_inf
        elif self.reads_both:
            optimizer.found_inf = torch.zeros(())
        last_hook = None if self.after_hooks is None else self._last_hook(self.after_hooks)
        recorder.depth += 1
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            recorder.depth -= 1
            if last_hook is not None:
                last_hook.remove()
            for name in ("grad_scale", "found_inf"):
                with contextlib.suppress(AttributeError):
                    delattr(optimizer, name)

    def multiplied_step(self, factor: float | Tensor, *args: Any, **kwargs: Any) -> Any:
        """Gradients x factor, then the step."""
        self.multiply(factor)
        return self.plain_step(*args, **kwargs)

    def has_hooks(self) -> bool:
        """Can a hook change gradients at the beginning of step()? One with the attribute
        `gradlift_reads_only = True` does not."""
        own = getattr(self.optimizer, "_optimizer_step_pre_hooks", None)
        if own is None:  # no torch.optim.Optimizer: it calls none
            return False
        for hook in (*own.values(), *_global_optimizer_pre_hooks.values()):
            if not getattr(hook, "gradlift_reads_only", False):
                return True
        return False

    def plain_step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step; hooks that record optimizers are silent meanwhile."""
        last_hook = None if self.after_hooks is None else self._last_hook(self.after_hooks)
        recorder.depth += 1
        try:
            return self.optimizer.step(*args, **kwargs)
        finally:
            recorder.depth -= 1
            if last_hook is not None:
                last_hook.remove()

    def _last_hook(self, call: Callable[[], None]) -> Any:
        self.note()
        return self.optimizer.register_step_pre_hook(lambda *_: call())

    def weights(self) -> list[Tensor]:
        """What the step moves, in the order of the parameters."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def out_of_range(self) -> Any:
        """Did a 16-bit weight stay at its format's largest number in the last step, since its
        master lies beyond? A tensor on a device."""
        return False

    def at_limit(self) -> list[Tensor]:
        """The parameters with such weights."""
        return []


class PlainGradients(GradientSource):
    """The gradients of an optimizer that steps its parameters themselves.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> w.grad = torch.full((2,), 8.0)
    >>> gradients = PlainGradients(torch.optim.SGD([w], lr=0.5))
    >>> params, held, elements = gradients.find()
    >>> gradients.multiplied_step(0.125)
    >>> w.data
    tensor([0.5000, 0.5000])
    >>> gradients.note()
    >>> w.grad[0] = 3.0
    >>> gradients.changed()
    True
    """

    def __init__(self, optimizer: Any, allow_fp16_params: bool = False) -> None:
        super().__init__(optimizer)
        # Without a step no update can get lost.
        self.allow_fp16_params = allow_fp16_params or not hasattr(optimizer, "step")
        self.reads_both = not type(optimizer).__module__.startswith("torch.")  # torch's own do not

    def find(self, *, by_parameter: bool = False, spread: bool = False) -> Found:
        """Sparse gradients are coalesced (duplicates added up) before anybody looks at them; those
        that are spread over ranks are laid out as their parameters are."""
        params, grads, elements = [], [], []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                if g.is_complex() or (p.dtype is torch.float16 and not self.allow_fp16_params):
                    _refuse(p, self.optimizer)
                if g.is_sparse and not g.is_coalesced():
                    p.grad = g = g.coalesce()
                each = g._values() if g.is_sparse else g
                if spread and type(g) is not Tensor and is_dtensor(g):  # the second is quick
                    g = brought_home(p, g)
                    each = local(g)
                params.append(p)
                grads.append(g)
                elements.append(each)
        self.params, self.held, self.elements = params, grads, elements
        return params, grads, elements

    def check_settings(self) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(set(map(id, params))) < len(params):
            twice = next(p for i, p in enumerate(params) if any(q is p for q in params[:i]))
            raise MisuseError(
                f"{name_of(twice)} is in this optimizer twice, so its gradient would be unscaled "
                "twice: keep it in one parameter group"
            )
        if self.allow_fp16_params and hasattr(self.optimizer, "step"):
            refuse_vanishing(self.optimizer)

    def each(self) -> list[Tensor]:
        return self.elements

    def multiply(self, factor: float | Tensor) -> None:
        multiply(self.params, self.elements, factor)


def gradients_of(optimizer: Any, allow_fp16_params: bool = False) -> GradientSource:
    """The gradients of this optimizer: as its class provides them, else on its parameters."""
    source = getattr(type(optimizer), "gradient_source", None)
    return PlainGradients(optimizer, allow_fp16_params) if source is None else source(optimizer)


def reference(optimizer: Any, forget: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """How to get it while it lives; one with `__slots__` may allow only what keeps it alive.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    >>> reference(optimizer)() is optimizer
    True
    """
    try:
        return weakref.ref(optimizer, forget)
    except TypeError:
        return lambda: optimizer


def _refuse(p: Tensor, optimizer: Any) -> None:
    if p.is_complex():
        raise MisuseError(
            f"the gradient of {name_of(p)} is complex; loss scaling is for real numbers: keep "
            "complex parameters in an optimizer of their own, without a scaler"
        )
    params = [q for group in optimizer.param_groups for q in group["params"]]
    more = sum(q.dtype is torch.float16 for q in params) - 1
    who = name_of(p) + (f" and {more} more are" if more else " is a") + " float16 parameter"
    who += "s" * (more > 0)
    kind = type(optimizer).__name__
    if is_dtensor(p):
        raise MisuseError(
            f"{who}. Updates smaller than their last bit would be lost. FSDP2 keeps float32 shards "
            "by itself: leave the model in float32 and let MixedPrecisionPolicy(param_dtype=...) "
            "make it float16 on the way; allow_fp16_params=True goes on regardless"
        )
    raise MisuseError(
        f"{who}. Updates smaller than their last bit would be lost, and fused optimizers are wrong "
        f"on them. Let gradlift.torch.MasterWeights({kind}, ...) keep float32 masters, or keep the "
        "model in float32 and use torch.autocast; allow_fp16_params=True goes on regardless"
    )


# Multiplied in float32 by torch's kernels or only compared: they do not vanish.
_NEVER_ROUNDED = {
    *("lr", "initial_lr", "max_lr", "min_lr", "lr_decay", "weight_decay", "lambd", "momentum"),
    *("tolerance_grad", "tolerance_change"),
}


def refuse_vanishing(optimizer: Any) -> None:
    """A setting that is 0 in the parameters' dtype: an `eps` that vanishes lets 0/0 through.

    torch's own optimizers are refused; another may compute in float32, so it gets a warning.

    >>> w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    >>> refuse_vanishing(torch.optim.Adam([w], eps=1e-4))
    """
    kind = type(optimizer)
    for group in optimizer.param_groups:
        narrow = next((p for p in group["params"] if p.dtype is torch.float16), None)
        # Fused kernels compute in float32; Adagrad's holds its sum of squares in float16.
        if narrow is None or (
            group.get("fused") and not isinstance(optimizer, torch.optim.Adagrad)
        ):
            continue
        for name, value in group.items():
            values = value if isinstance(value, (tuple, list)) else (value,)
            lost = [
                v
                for v in values
                if type(v) is float and v and not torch.tensor(v, dtype=narrow.dtype).item()
            ]
            if not lost or name in _NEVER_ROUNDED:
                continue
            text = (
                f"{name}={lost[0]:g} of {kind.__name__} is 0 in float16, the dtype of "
                f"{name_of(narrow)}: where a gradient is 0, or its square vanishes, the step "
                f"divides by 0 and writes NaN. Pass {name}=1e-4 or more, or use "
                f"gradlift.torch.MasterWeights({kind.__name__}, ...)"
            )
            if kind.__module__.startswith("torch.optim"):
                raise MisuseError(text)
            warn(text)


def refuse_nan(optimizer: Any) -> None:
    """Settings by which a sound gradient would write NaN; those on a device are not waited for.

    >>> refuse_nan(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    """
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if type(lr) is not float:
            lr = _number(lr)
        if lr - lr != 0:
            raise SettingsError(f"the learning rate is {lr}: nothing was written")
        for name, value in group.items():
            if type(value) is float and value != value:
                raise SettingsError(f"the {name} is {value}: nothing was written")


def _number(lr: Any) -> float:
    """A learning rate as a number; 0.0 if it is none that can be looked at."""
    if isinstance(lr, Tensor) and (type(lr) is not Tensor or not lr.is_cpu or lr.numel() != 1):
        return 0.0
    try:
        return float(lr)
    except (TypeError, ValueError):
        return 0.0


def _version(g: Tensor) -> int:
    """How often it was written to."""
    try:
        count = g._version
    except RuntimeError:  # made in inference mode: nobody counts
        return -1
    return count + local(g)._version if is_dtensor(g) else count


def is_expanded(g: Tensor) -> bool:
    """More elements than places in memory: it cannot be written.

    >>> is_expanded(torch.ones(1).expand(3)), is_expanded(torch.ones(3).as_strided((2, 2), (1, 1)))
    (True, True)
    """
    if g.is_contiguous():
        return False
    return 1 + sum((n - 1) * s for n, s in zip(g.shape, g.stride())) < g.numel()


def multiply(params: list[Tensor], grads: list[Tensor], factor: float | Tensor) -> None:
    """grads *= factor, in place, in one pass a device; what cannot be written is replaced."""
    if not grads or (isinstance(factor, float) and factor == 1.0):
        return
    with torch.no_grad():
        for i, (p, g) in enumerate(zip(params, grads)):
            if is_expanded(g):
                p.grad = grads[i] = g.clone(memory_format=torch.contiguous_format)
        if len(set(map(id, grads))) < len(grads):  # one tensor for two parameters: once
            grads = list({id(g): g for g in grads}.values())
        if not isinstance(factor, Tensor):
            torch._foreach_mul_(grads, factor)
            return
        for device in dict.fromkeys(g.device for g in grads):
            here = [g for g in grads if g.device == device]
            torch._foreach_mul_(here, factor.to(device, non_blocking=True))
