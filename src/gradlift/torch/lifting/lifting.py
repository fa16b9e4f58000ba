"""`layerwise`: each block of a network gets a power of two of its own on top of the scale.

One scale cannot serve a network whose parts have gradients more than 40 binades apart: float16 has
no room for both. A block's lift brings its gradients up to those of the others; the scale does the
rest. boundary.py says why this is right whatever the network looks like.
"""

from __future__ import annotations

import copy
import fnmatch
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...errors import MisuseError, SettingsError, StateError
from ...reading import NAN, Reading
from ...text import shown
from ..nested import mapped
from ..probing import GradientWatcher, checked_every, largest, unwatch, watch
from .boundary import HALF_LEAF, BlockCall, check_boundaries, widened
from .lifts import BlockLift, BlockObserver, BlockRecord, dump, learn, load, read_peaks, tracker
from .verification import check_lifts, trial_lift

SCHEMA = 1
_TRIES = 16  # windows after which a block that shows nothing is left alone
_thread = threading.local()  # `call`: of the block that is running; `roots`: calls of the model


def layerwise(
    model: nn.Module,
    blocks: Iterable[nn.Module | str] | None = None,
    *,
    rule: Any = "auto",
    every: int = 100,
    check: bool = True,
) -> Layerwise:
    """Gives each block of `model` a lift: inside, gradients flow at scale x lift.

    | argument | meaning |
    |---|---|
    | `blocks` | modules, or names ("head", "layers.*"); None: the model's children, and those of \
a ModuleList or Sequential instead of itself |
    | `rule` | follows each block's largest gradient: "auto" or another `Headroom` |
    | `every` | after it has found the lifts it looks again in one of so many passes |
    | `check` | compares lifted and plain gradients on the first batch |

    Nothing else is to be done: each `gradlift.torch.GradScaler` that steps the model's parameters
    reads it. What comes out of a block is float32 where it was float16; inside nothing changes.
    Lifts act wherever gradients are recorded, in `train()` as in `eval()`. A copy or a pickle of
    the model has no lifts. Not for `torch.compile`, nor for gradients of gradients (refused).

    >>> from gradlift.torch import GradScaler
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> lifted = layerwise(model)
    >>> optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    >>> with torch.autocast("cpu", torch.float16):
    ...     loss = 1e-12 * model(torch.ones(8, 4)).mean()
    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> list(lifted.lifts)
    ['0', '1']
    """
    return Layerwise(model, blocks, rule, every, check)


class Layerwise(GradientWatcher):
    """What `layerwise` returns: `lifts`, `state_dict()`, `load_state_dict()`, `remove()`."""

    def __init__(self, model: nn.Module, blocks: Any, rule: Any, every: int, check: bool) -> None:
        self.every = checked_every(every)
        if not isinstance(model, nn.Module) or isinstance(model, DataParallel):
            raise MisuseError(
                f"layerwise() wants a torch.nn.Module, this is {type(model).__name__}"
                + (": use DistributedDataParallel" if isinstance(model, DataParallel) else "")
            )
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.rule = tracker(rule, every)
        self.blocks = chosen = choose(self.model, blocks)
        self._lifts = {name: BlockLift(self.rule.init()) for name in chosen}
        self.off = False
        """No lift is applied: in the plain half of the check, or after `remove`."""
        self.check_due, self.checking = check, False
        self.sampling = self.settled = self.walk_due = False
        self.passes = self.windows = 0
        self._called: set[str] = set()
        self._params = {id(p) for p in self.model.parameters()}
        self.records: dict[str, BlockRecord] = {}
        """Of this window, in the order in which backward reached the blocks."""
        self._unread: dict[str, BlockRecord] = {}
        self._wrappers: list[_Wrapper] = [_Block(self, *block) for block in chosen.items()]
        if "" not in chosen:
            self._wrappers.append(_Root(self, self.model))
        watch(self)

    @property
    def lifts(self) -> dict[str, float]:
        """Each block's lift, by name."""
        return {name: block.lift for name, block in self._lifts.items()}

    # Passes

    def begin(self) -> None:
        """A pass begins: is it to be looked at?"""
        turn = not self.settled or self.again or self.passes % self.every == 0
        self.sampling = turn and not self.checking
        self.passes += 1
        self._called.clear()
        self.walk_due = self.sampling
        if self.sampling:
            self._params = {id(p) for p in self.model.parameters()}

    def check_first(self, args: Any, kwargs: Any) -> None:
        """Before the first training pass: are lifted gradients the plain ones?"""
        if not self.check_due or not self.model.training:
            return
        self.check_due, self.checking = False, True
        kept = self._lifts, self.passes
        self._lifts = {
            name: BlockLift(block.state, trial_lift(i))
            for i, (name, block) in enumerate(self._lifts.items())
        }
        try:
            check_lifts(self, args, kwargs)
        finally:
            self._lifts, self.passes = kept
            self.checking = self.off = False

    def enter(self, block: _Block) -> BlockCall:
        """A block is called. Outside of a call of the model, a second call begins a new pass."""
        recomputed = torch._C._current_graph_task_id() != -1  # in backward: by checkpointing
        if block.name in self._called and not getattr(_thread, "roots", 0) and not recomputed:
            self.begin()
        self._called.add(block.name)
        name, lift = block.name, self._lifts[block.name].lift
        observer = BlockObserver(self, name, block.module, lift) if self.sampling else None
        return BlockCall(name, lift, observer)

    # What a GradScaler reads

    def covers(self, params: list[Tensor]) -> bool:
        return any(id(p) in self._params for p in params)

    def peak(self) -> Any:
        seen = [(r.inner, self._lifts[name].lift) for name, r in self.records.items()]
        top = largest(peak if peak is NAN else peak * lift for peak, lift in seen)
        return top.clamp(min=0.0) if isinstance(top, Tensor) else top

    def ended(self, reading: Reading, scale: Any) -> None:
        # Where an answer would have to be waited for, the next turn comes in its time.
        self.again = reading.nonfinite is True
        if not self.looked:
            return
        peaks, used, loss_nonfinite = read_peaks(self.records, scale, reading.loss_nonfinite)
        self._unread = self.records
        self.forget()
        if loss_nonfinite:
            return
        self.windows += 1
        searching = not self.settled and self.windows < _TRIES
        moved = learn(self.rule, self._lifts, peaks, used, searching)
        self.settled = self.settled or not moved or not searching
        self.again |= moved

    def forget(self) -> None:
        self.records, self.looked = {}, False

    def discard(self) -> None:
        self._unread = {}

    def scaled(self, loss: Tensor) -> None:
        """A gradient must get into a block through its boundary: else it lacks the lift."""
        if self.walk_due:
            self.walk_due = False
            check_boundaries(loss)

    def samples(self) -> dict[str, dict[str, Any]]:
        """Shares of the gradient at each block's output, as lifted."""
        unread, self._unread = self._unread, {}
        return {
            name: record.described() for name, record in unread.items() if record.part is not None
        }

    # State

    def state_dict(self) -> dict[str, Any]:
        """Lifts and what they were found from, and when to look again."""
        return {
            "schema": SCHEMA,
            "passes": self.passes,
            "windows": self.windows,
            "settled": self.settled,
            "again": self.again,
            "blocks": dump(self.rule, self._lifts),
        }

    def load_state_dict(self, state: Any) -> None:
        """Everything is checked before anything is changed."""
        if not isinstance(state, dict) or state.get("schema") != SCHEMA:
            raise StateError(f"this is no layerwise state of schema {SCHEMA}: {shown(state)}")
        for name, kind in (("passes", int), ("windows", int), ("settled", bool), ("again", bool)):
            value = state.get(name)
            if type(value) is not kind or value < 0:
                raise StateError(f"{name} is {shown(value)}, expected {kind.__name__}")
        self._lifts = load(self.rule, list(self._lifts), state.get("blocks"))
        self.passes, self.windows = state["passes"], state["windows"]
        self.settled, self.again = state["settled"], state["again"]
        self.forget()
        self.discard()

    def remove(self) -> None:
        """The model is as it was before."""
        self.off = True
        for wrapper in self._wrappers:
            wrapper.unwrap()
        unwatch(self)


class _Wrapper:
    """Stands where a module's `forward` was: hooks of the module stay outside."""

    def __init__(self, owner: Layerwise, module: nn.Module) -> None:
        self.owner, self.module = owner, module
        self.former = module.__dict__.get("forward")
        self.plain = self.former or types.MethodType(type(module).forward, module)
        module.__dict__["forward"] = self

    def unwrap(self) -> None:
        if self.module.__dict__.get("forward") is self:  # else it was wrapped once more
            del self.module.__dict__["forward"]
            if self.former is not None:
                self.module.__dict__["forward"] = self.former

    # A copy or a pickle of the module gets its plain forward back.

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        if self.former is not None:
            return copy.copy, (self.former,)
        return getattr, (self.module, "forward")  # as of any bound method


class _Root(_Wrapper):
    """Counts passes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.owner.off or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        self.owner.check_first(args, kwargs)
        self.owner.begin()
        _thread.roots = getattr(_thread, "roots", 0) + 1
        try:
            return self.plain(*args, **kwargs)
        finally:
            _thread.roots -= 1


class _Block(_Wrapper):
    """The boundary around a block."""

    def __init__(self, owner: Layerwise, name: str, module: nn.Module) -> None:
        super().__init__(owner, module)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.owner.off:
            return self.plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            out = self.plain(*args, **kwargs)
            # Reentrant checkpointing: the gradient of this very output must fit it later.
            return mapped(out, widened) if self.module.training else out
        around = getattr(_thread, "call", None)
        if around is not None:  # called by another block: a part of it
            with around.weights_of(self.module):
                return self.plain(*args, **kwargs)
        if self.name == "":
            self.owner.check_first(args, kwargs)
            self.owner.begin()
        call = self.owner.enter(self)
        args, kwargs = mapped(args, call.enter), mapped(kwargs, call.enter)
        _thread.call = call
        try:
            with call.weights_of(self.module), call.observed(self.module):
                out = self.plain(*args, **kwargs)
        finally:
            _thread.call = None
        call.write_back()
        return mapped(out, call.leave)


# Which modules are blocks


def choose(model: nn.Module, blocks: Iterable[nn.Module | str] | None) -> dict[str, nn.Module]:
    """name -> module, in the model's order; refuses what cannot work."""
    names = {m: name for name, m in model.named_modules()}
    chosen = _default(model) if blocks is None else _asked_for(names, blocks)
    found = {name: m for m, name in names.items() if m in chosen}
    if not found:
        raise SettingsError("there is no block to lift: blocks is empty")
    for name, block in found.items():
        for m in block.modules():
            if m is not block and m in chosen:
                raise SettingsError(
                    f"block {names[m]!r} lies inside block {name!r}: name one of them"
                )
            if isinstance(m.__dict__.get("forward"), _Block):
                raise MisuseError(
                    f"{names[m]!r} is lifted already: call remove() of the first layerwise() first"
                )
        for p_name, p in block.named_parameters(prefix=name):
            if is_lazy(p):
                raise MisuseError(f"{p_name} has no shape yet: call the model once before")
            if p.dtype is torch.float16:
                raise MisuseError(HALF_LEAF.format(p_name))
    return found


def _default(model: nn.Module) -> set[nn.Module]:
    children = []
    for child in model.children():
        opened = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        children += list(child.children()) if opened else [child]
    return {c for c in children if any(True for _ in c.parameters())} or {model}


def _asked_for(names: dict[nn.Module, str], blocks: Iterable[nn.Module | str]) -> set[nn.Module]:
    if isinstance(blocks, (str, nn.Module)):
        raise SettingsError("blocks is a list of modules or names, this is a single one")
    chosen: set[nn.Module] = set()
    for block in blocks:
        if isinstance(block, str):
            some = {m for m, name in names.items() if _matches(name, block)}
        else:
            some = {m for m in names if m is block}
        if not some:
            what = repr(block) if isinstance(block, str) else f"a {type(block).__name__}"
            raise SettingsError(
                f"the model has no module {what}; it has "
                f"{', '.join(list(names.values())[1:8]) or 'none'}, ..."
            )
        chosen |= some
    return chosen


def _matches(name: str, pattern: str) -> bool:
    """A star stays between two dots: "layers.*" are the layers, not what is inside them."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
