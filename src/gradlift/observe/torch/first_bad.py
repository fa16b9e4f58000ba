"""When a loss or a gradient is not finite: which operation, input, buffer or weight was the first?

    inputs -> the forward pass once more -> buffers -> the next steps, watched

The forward pass is run again under a `Finder`; random states and buffers are put back, what it
prints is dropped. What lies outside modules, and the backward pass, can only be seen when it
happens again: so the next few steps are watched.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...journal import Recorder
from ...torch.nested import tensors
from ...torch.ranks.sharding import local
from ..patches import Patches
from .calls import CallOrder, parameters_of
from .finder import End, Finder, Origin, at_a_bad_point, in_graph
from .forward import has_compiled
from .rerunning import as_it_was, silence
from .variables import bad_variable

_WATCHED = 12  # steps after a bad one
_WATCHED_LOST = 40  # if weights are not finite: nothing is trained any more
_SEARCHES = 3  # in a run
_IN_A_ROW = 3  # bad gradients: fewer are a scale that is being found
_SPREAD = ("FullyShardedDataParallel", "FSDPModule", "SyncBatchNorm")


class ModuleCall(NamedTuple):
    """A call of an outermost module, and what it needs to be made once more."""

    module: nn.Module
    args: Any
    kwargs: Any
    autocast: list[torch.autocast]
    versions: list[int]
    """Of the tensors it was given: one that was changed since is no longer what it was."""
    steps: int
    """Of optimizers, before it: a step since may have changed its weights."""


class FirstBad:
    """Remembers the calls of outermost modules, and searches when something is not finite."""

    def __init__(self, recorder: Recorder, order: CallOrder) -> None:
        self.recorder, self.order, self.places = recorder, order, order.places
        self.patches = Patches()
        self.depth = self.searches = self.in_a_row = self.watched = 0
        self.finder: Finder | None = None
        """While it is entered: the modules that are called are noted in it."""
        self.anomaly: Any = None
        self.answered = False
        """Was the cause found, and has no loss been finite since?"""
        self.calls: list[ModuleCall] = []
        self.ends: list[End] = []
        """The operations at the end of the last loss that was not scaled."""
        self.known: set[Origin] = set()
        self.meant: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        """The buffers of each module that held inf when they were first looked at."""
        self.steps = 0
        self.stepped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The last step of each optimizer."""
        plain_call = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            finder = self.finder
            if (self.depth and finder is None) or torch.compiler.is_compiling():
                return plain_call(module, *args, **kwargs)  # inside another, nobody is looking
            if self.depth == 0 and torch.is_grad_enabled():
                self.remember(module, args, kwargs)
            self.depth += 1
            if finder is not None:
                finder.modules.append(module)
            try:
                return plain_call(module, *args, **kwargs)
            finally:
                self.depth -= 1
                if finder is not None and finder.modules:
                    finder.modules.pop()

        self.patches.attribute(nn.Module, "__call__", call)

    def remove(self) -> None:
        self.unwatch()
        self.patches.restore()

    def remember(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen = [i for i, call in enumerate(self.calls) if call.module is module]
        del self.calls[: seen[-1] + 1 if seen else 0]  # called again: a new iteration
        plain = not kwargs and all(type(a) is Tensor for a in args)
        given = list(args) if plain else tensors((args, kwargs))
        devices = {"cpu", *(t.device.type for t in given)}
        modes = [
            torch.autocast(d, torch.get_autocast_dtype(d), True)
            for d in devices
            if torch.is_autocast_enabled(d)
        ]
        versions = versions_of(given)
        self.calls.append(ModuleCall(module, args, kwargs, modes, versions, self.steps))

    def weights_written(self, optimizer: Any) -> None:
        """After a step of an optimizer."""
        self.steps += 1
        self.stepped[optimizer] = self.steps

    # A loss that is not finite

    def loss(self, losses: list[Tensor], step: int) -> None:
        """Before the backward pass of a loss that is not finite."""
        if self.answered or self.searches >= _SEARCHES or self.finder is not None:
            return
        self.searches += 1
        origin = (
            next(self._search(), None)
            or in_graph(losses, self.places)
            or bad_variable(losses, self.places, sys._getframe(1))
        )
        if origin is not None:
            self.answered = True
            self._tell(origin, step)
        else:
            self.watched = _WATCHED_LOST if self._weights_bad() else _WATCHED

    def _weights_bad(self) -> bool:
        return any(_any_bad(call.module.parameters()) for call in self.calls)

    def _search(self) -> Iterator[Origin]:
        for call in self.calls:
            given = tensors((call.args, call.kwargs))
            kinds = [kind_of(t) for t in given]
            # What was computed is no data.
            data = [i for i, t in enumerate(given) if kinds[i] and not t.requires_grad]
            for i in data:
                if kinds[i] == "nan":
                    yield Origin("nan", "input", input=_at(given[i], i, len(given)))
                    return
            if why := self._why_not(call):
                self._note(f"the forward pass was not run again: {why}")
                return
            finder = self._again(call)
            found = finder.origin()
            if found is not None and not finder.from_outside():
                yield found
                return
            for i in data:
                if found is not None or not _is_mask(given[i]):
                    yield Origin("inf", "input", input=_at(given[i], i, len(given)))
                    return
            # What was bad before may have poisoned its buffers in this very pass.
            if not any(kinds) and not _any_bad(call.module.parameters()):
                for path, module in call.module.named_modules():
                    for name, kind in self._poisoned(module).items():
                        yield Origin(kind, "buffer", f"{path}.{name}".removeprefix("."))
                        return
            if found is not None:
                yield found
                return

    def _poisoned(self, module: nn.Module) -> dict[str, str]:
        """Which of a module's own buffers hold inf or NaN, and which of the two. An inf that was
        there from the beginning is meant: a mask, the bounds of an observer."""
        buffers = {n: b for n, b in module._buffers.items() if b is not None}
        bad = {name: kind for name, b in buffers.items() if (kind := kind_of(b))}
        if module not in self.meant:
            self.meant[module] = {n for n in bad if not n.startswith("running_")}
        meant = self.meant[module]
        return {name: kind for name, kind in bad.items() if kind == "nan" or name not in meant}

    def _why_not(self, call: ModuleCall) -> str:
        """Why a call cannot be made once more; "" if it can."""
        if why := _spread(call.module):
            return why
        if versions_of(tensors((call.args, call.kwargs))) != call.versions:
            return "an input was changed in place since"
        weights = {id(p) for p in call.module.parameters()}
        for optimizer, step in self.stepped.items():
            if step > call.steps and any(id(p) in weights for p in parameters_of(optimizer)):
                return "its weights were changed since"
        return ""

    def _again(self, call: ModuleCall, *, backward: bool = False) -> Finder:
        """Makes a call once more, and puts everything back. With `backward` its outputs are
        differentiated as well, with a gradient of ones; no `.grad` is changed."""
        module: Any = call.module.module if _is_ddp(call.module) else call.module
        finder = Finder(self.places)
        finder.names = _names([module])
        self.finder, self.depth = finder, self.depth + 1
        try:
            with torch.set_grad_enabled(backward), contextlib.ExitStack() as around:
                around.enter_context(self.order.aside())
                if backward:
                    around.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
                if has_compiled():
                    around.enter_context(torch.compiler.set_stance("force_eager"))
                for mode in call.autocast:
                    around.enter_context(mode)
                around.enter_context(as_it_was(module))
                around.enter_context(silence())
                around.enter_context(finder)
                out = module(*call.args, **call.kwargs)
                if backward:
                    _differentiate(module, tensors(out))
        except Exception as error:  # what cannot be run again cannot be traced
            self._note(f"the forward pass could not be run again: {error!r:.200}")
        finally:
            self.finder, self.depth = None, self.depth - 1
        return finder

    def buffers(self, modules: Any, step: int) -> None:
        """In a sampled step: are the buffers of these modules finite?"""
        if self.answered:
            return  # a pass whose cause is known has poisoned them
        for module in modules:
            for name, kind in self._poisoned(module).items():
                if not self._weights_bad():  # which poison buffers, too
                    self._tell(Origin(kind, "buffer", f"{type(module).__name__}.{name}"), step)
                return

    # Gradients that are not finite

    def before_step(self, step: int, scale: float) -> None:
        """Gradients are not finite, though the losses were, and no weight has been written yet."""
        if self.searches >= _SEARCHES or self.finder is not None:
            return
        if scale > 1 and self.in_a_row < _IN_A_ROW - 1:
            return  # the scale may be too high
        self.searches += 1
        for call in self.calls:
            if why := self._why_not(call):
                self._note(f"the backward pass was not run again: {why}")
                return
            origin = self._again(call, backward=True).origin()
            if origin is not None:
                self._tell(origin, step)
                return
        origin = at_a_bad_point(self.ends)
        if origin is not None:
            self._tell(origin, step)

    def gradients(self, bad: bool, scale: float) -> None:
        """After each step: were gradients not finite, though the losses were?"""
        self.in_a_row = self.in_a_row + 1 if bad else 0
        often = self.in_a_row >= _IN_A_ROW or (bad and scale <= 1)
        if often and self.searches < _SEARCHES and not (self.watched or self.answered):
            self.searches += 1
            self.watched = _WATCHED_LOST if self._weights_bad() else _WATCHED

    # Watched steps

    def begin(self) -> None:
        """Begins a window: it is watched if one before it was bad. Compiled code would be compiled
        anew for that, and round differently."""
        if not self.watched or self.finder is not None or has_compiled():
            return
        if any(_spread(call.module) for call in self.calls):
            return
        if not _get_current_dispatch_mode_stack():
            self.watched -= 1
            self.finder = Finder(self.places)
            self.finder.names = _names([call.module for call in self.calls])
            self.anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
            self.finder.__enter__()

    def end(self, step: int, bad: bool) -> None:
        """Ends a window."""
        finder = self.finder
        self.unwatch()
        origin = finder.origin() if finder is not None and bad else None
        if origin is not None:
            self.watched = 0
            self._tell(origin, step)

    def unwatch(self) -> None:
        stack = _get_current_dispatch_mode_stack()
        if self.finder is None or not stack or stack[-1] is not self.finder:
            return
        self.finder.__exit__(None, None, None)
        self.anomaly.__exit__(None, None, None)
        self.finder = None

    # Lines

    def _tell(self, origin: Origin, step: int) -> None:
        if origin not in self.known:
            self.known.add(origin)
            self.recorder.event("origin", step, **origin._asdict())
            self.places.write_source(self.recorder)

    def _note(self, text: str) -> None:
        self.recorder.event("note", None, code="untraced", text=text)


def _names(modules: list[nn.Module]) -> dict[nn.Module, str]:
    """Dotted paths, without the part that `torch.compile` adds."""
    return {
        m: path
        for module in modules
        for name, m in module.named_modules()
        if (path := name.removeprefix("_orig_mod").removeprefix("."))
    }


def _differentiate(module: nn.Module, outputs: list[Tensor]) -> None:
    outputs = [t for t in outputs if t.requires_grad]
    params = [p for p in module.parameters() if p.requires_grad]
    if outputs and params:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, params, ones, allow_unused=True)


def kind_of(t: Tensor) -> str:
    """ "nan" or "inf" if a tensor is not finite, else ""."""
    t = local(t)  # the whole of it would need the other ranks
    if not t.is_floating_point() or bool(torch.isfinite(t).all()):
        return ""
    return "nan" if bool(torch.isnan(t).any()) else "inf"


def _any_bad(params: Iterable[Tensor]) -> bool:
    return any(kind_of(p.detach()) for p in params)


def _is_mask(t: Tensor) -> bool:
    """0 and -inf only: to be added to scores, where it does no harm."""
    return bool(((t == 0) | (t == -math.inf)).all())


def versions_of(given: list[Tensor]) -> list[int]:
    """How often each was changed in place; -1 where torch does not count."""
    return [-1 if t.is_inference() else t._version for t in given]


def _at(t: Tensor, i: int, of: int) -> str:
    """Which input, and where in it."""
    bad = (~torch.isfinite(t)).nonzero()
    which = f"input {i + 1} of {of}" if of > 1 else "the input"
    index = ", ".join(str(int(x)) for x in bad[0]) if bad.numel() else ""
    return f"{which}, {len(bad)} of {t.numel()} elements, first at [{index}]"


def _is_ddp(module: nn.Module) -> bool:
    return type(module).__name__ == "DistributedDataParallel"


def _spread(module: nn.Module) -> str:
    """Why a rank must not run a module alone; "" if it may."""
    for m in module.modules():
        for kind in type(m).__mro__:
            if kind.__name__ in _SPREAD:
                return f"other ranks take part in it ({kind.__name__})"
            if kind is torch.jit.ScriptModule:
                return "it is compiled by TorchScript"
    if any(type(p).__name__ == "DTensor" for p in module.parameters()):
        return "its parameters are spread over ranks"
    if any(getattr(stage, "submod", None) is module for stage in _pipeline_stages()):
        return "it is a stage of a pipeline"
    return ""


def _pipeline_stages() -> Iterator[Any]:
    """The stages that are alive: a module does not know that it belongs to one."""
    if "torch.distributed.pipelining.stage" in sys.modules:
        for thing in gc.get_objects():
            if any(kind.__name__ == "_PipelineStageBase" for kind in type(thing).__mro__):
                yield thing
