"""Compares lifted with plain gradients, before the first batch is used.

The model is run on it twice, plain and with a different lift in every block, and differentiated
with the same random numbers at its outputs. In float32 a power of two changes no bit, so all
gradients must be equal to the bit, up to what two plain runs differ by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MisuseError, warn
from ..nested import mapped, tensors
from ..scaler.graph import leaves
from ..scaler.retrying import Replay, without_trace
from .boundary import swapped

if TYPE_CHECKING:
    from .lifting import Layerwise

_EXACT = 2.0**-20  # in float32 nothing is rounded; room for a kernel that is chosen by address
_HALF = 2.0**-7  # where the model itself goes to float16, a lift changes what is flushed
_NOISE = 4.0  # two runs are a small sample of what runs differ by


def trial_lift(i: int) -> float:
    """Neighbours differ, up as well as down, and float16 could hold it.

    >>> [trial_lift(i) for i in range(4)]
    [8.0, 0.03125, 16.0, 0.015625]
    """
    return 2.0 ** ((3, -5, 4, -6)[i % 4])


class ModelGradients(NamedTuple):
    """Gradients of one pass."""

    names: list[str]
    grads: list[Tensor | None]
    half: bool
    """Did the model go to float16 by itself?"""


def check_lifts(owner: Layerwise, args: Any, kwargs: Any) -> None:
    """MisuseError if lifts change a gradient. The model is left as it was found."""
    with without_trace(owner.model) as before:
        try:
            plain = _run(owner, args, kwargs, before, lifted=False)
            lifted = _run(owner, args, kwargs, before, lifted=True)
        except Exception as error:
            warn(
                f"layerwise: the first batch could not be computed twice ({error!r:.200}), so it "
                "was not checked that lifts leave the gradients alone"
            )
            return
        if not plain.names:
            return
        _refuse_kept(owner)
        bad = _unequal(plain, lifted, None)
        if bad:
            bad = _unequal(plain, lifted, _run(owner, args, kwargs, before, lifted=False))
        if bad:
            raise MisuseError(_complaint(owner, bad))


def _run(
    owner: Layerwise, args: Any, kwargs: Any, before: Replay, *, lifted: bool
) -> ModelGradients:
    """Gradients of all parameters and inputs, by names.

    They are taken at leaves of its own that stand in for the parameters: hooks on the parameters,
    such as DDP's, do not fire.
    """
    before.restore()
    owner.off = not lifted
    model = owner.model
    params = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    own = {i: p.detach().requires_grad_() for i, (_, p) in params.items()}
    given: dict[int, Tensor] = {}

    def again(x: Tensor) -> Tensor:  # a copy: the model might write to it
        if id(x) not in given:
            wide = x.detach().float() if x.dtype in (torch.float16, torch.bfloat16) else x.detach()
            given[id(x)] = wide.clone().requires_grad_(x.requires_grad)
        return given[id(x)]

    args, kwargs = mapped(args, again), mapped(kwargs, again)
    with swapped(model, own), _in_float32(model) as halves, torch.enable_grad():
        found = tensors(model.forward(*args, **kwargs))
        outputs = [t for t in found if t.requires_grad]
        if not outputs:
            return ModelGradients([], [], False)
        draw = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(t.shape, generator=draw).to(t.device, t.dtype) for t in outputs]
        mine = [*own.values(), *(x for x in given.values() if x.requires_grad)]
        known = {id(x) for x in mine}
        others = {id(x): x for t in outputs for x in leaves(t) if id(x) not in known}
        if others:  # reached by another way than through the modules: they must not accumulate
            wanted = [*mine, *others.values()]
            grads: list[Any] = list(
                torch.autograd.grad(
                    outputs, wanted, cotangents, allow_unused=True, retain_graph=True
                )
            )
        else:  # checkpointing may know no other way
            torch.autograd.backward(outputs, cotangents)
            grads = [x.grad for x in mine]
    names = [name for name, _ in params.values()]
    names += [f"input {i}" for i in range(len(mine) - len(names))]
    names += [params[i][0] if i in params else "a tensor that is no parameter" for i in others]
    return ModelGradients(names, grads, bool(halves))


@contextlib.contextmanager
def _in_float32(model: nn.Module) -> Iterator[list[nn.Module]]:
    """No autocast but the model's own; yields the modules that gave float16 all the same."""
    halves: list[nn.Module] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if any(t.dtype is torch.float16 for t in tensors(output)):
            halves.append(module)

    with contextlib.ExitStack() as modes:
        for device in {"cpu", *(p.device.type for p in model.parameters())}:
            if torch.amp.is_autocast_available(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        modes.callback(nn.modules.module.register_module_forward_hook(note).remove)
        yield halves


def _unequal(
    plain: ModelGradients, lifted: ModelGradients, again: ModelGradients | None
) -> list[str]:
    """What differs to the bit; with a second plain run, by more than the two plain ones do."""
    if plain.names != lifted.names:
        return ["what the outputs depend on"]
    bad = []
    for i, (name, a, b) in enumerate(zip(plain.names, plain.grads, lifted.grads)):
        if a is None or b is None:
            if a is not b:
                bad.append(name)
            continue
        a, b = a.to_dense(), b.to_dense()
        if bool(((a == b) | (a.isnan() & b.isnan())).all()):
            continue
        other = None if again is None else again.grads[i]
        if other is not None:
            most = a.abs().max()
            noise = (a - other.to_dense()).abs().max()
            if noise > most / 8:
                warn(
                    f"layerwise: two plain runs of the first batch differ in {name}, so it was not "
                    "checked that lifts leave its gradient alone"
                )
                continue
            allowed = _NOISE * noise + most * (_HALF if plain.half else _EXACT)
            if (a - b).abs().max() <= allowed:
                continue
        bad.append(name)
    return bad


def _refuse_kept(owner: Layerwise) -> None:
    """A tensor that a block keeps carries the block's lift to whoever takes it from there."""
    for name, block in owner.blocks.items():
        for inner, m in block.named_modules(prefix=name):
            for key, value in vars(m).items():
                if any(t.grad_fn is not None for t in tensors(value)):
                    raise MisuseError(
                        f"block {name!r} keeps a tensor with a gradient in {inner}.{key}. Whoever "
                        "takes it from there gives it a gradient without the block's lift: let "
                        "forward() return it, or keep it detached"
                    )


def _complaint(owner: Layerwise, bad: list[str]) -> str:
    mine = [b for b in owner.blocks if any(f"{n}.".startswith(f"{b}." if b else "") for n in bad)]
    where = f"block{'s' * (len(mine) > 1)} {', '.join(map(repr, mine[:4]))}" if mine else "no block"
    more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
    return (
        f"lifts change the gradients of {', '.join(bad[:4])}{more} (in {where}): with a lift in "
        "every block they are not what they are without. A tensor gets into or out of a block by "
        "another way than its arguments and results: kept on an object between calls, inside an "
        "object that is no tuple, list, dict or dataclass, a weight that is no parameter of the "
        "block, reentrant checkpointing inside the block (use_reentrant=False is fine), or an "
        "in-place change of a tensor that a block handed through. Choose other blocks, or mend it"
    )
