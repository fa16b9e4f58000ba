"""`layerwise`: each block of a network gets a power of two of its own on top of the scale.

One scale cannot serve a network whose parts have gradients more than 40 binades apart: float16 has
no room for both. A block's lift brings its gradients up to those of the others; the scale does the
rest. `_border.py` says why this is right whatever the network looks like.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import MisuseError, SettingsError, StateError
from ..reading import NAN, Reading
from ._blocks import choose
from ._border import Crossing, check_borders, mapped, widened
from ._levels import Level, dump, learn, load, tracker
from ._lift_check import check_lifts, trial_lift
from ._probe import Watcher, _watchers, largest, watch
from ._sight import Record, Sight

SCHEMA = 1
_TRIES = 16  # windows after which a block that shows nothing is left alone
_here = threading.local()  # the crossing that is under way in this thread


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
    hears of it. What comes out of a block is float32 where it was float16; inside nothing changes.
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
    return Layerwise(model, blocks, rule=rule, every=every, check=check)


class Layerwise(Watcher):
    """What `layerwise` returns: `lifts`, `state_dict()`, `load_state_dict()`, `remove()`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module | str] | None = None,
        *,
        rule: Any = "auto",
        every: int = 100,
        check: bool = True,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingsError(f"every is {every!r}, expected a whole number, 1 or more")
        if not isinstance(model, nn.Module) or isinstance(model, DataParallel):
            raise MisuseError(
                f"layerwise() wants a torch.nn.Module, this is {type(model).__name__}"
                + (": use DistributedDataParallel" if isinstance(model, DataParallel) else "")
            )
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.rule, self.every = tracker(rule, every), every
        self.blocks = chosen = choose(self.model, blocks)
        self._levels = {name: Level(self.rule.init()) for name in chosen}
        self.off = False
        """Everything goes its plain way: the check's first half, or removed."""
        self.unchecked = check
        self.rehearsing = False
        self.sampling = self.settled = self.unwalked = False
        self.passes = self.windows = 0
        self._called: set[str] = set()
        self._params = {id(p) for p in self.model.parameters()}
        self.records: dict[str, Record] = {}
        """Of this window, in the order in which backward came by."""
        self._unread: dict[str, Record] = {}
        self._blocks = [_Block(self, name, module) for name, module in chosen.items()]
        self._root = _Root(self, self.model) if "" not in chosen else None
        watch(self)

    @property
    def lifts(self) -> dict[str, float]:
        """Each block's lift, by name."""
        return {name: level.lift for name, level in self._levels.items()}

    # passes

    def begin(self) -> None:
        """A pass begins: is it to be looked at?"""
        turn = not self.settled or self.again or self.passes % self.every == 0
        self.sampling = turn and not self.rehearsing
        self.passes += 1
        self._called.clear()
        self.unwalked = self.sampling
        if self.sampling:
            self._params = {id(p) for p in self.model.parameters()}

    def rehearse(self, args: Any, kwargs: Any) -> None:
        """Before the first training pass: are lifted gradients the plain ones?"""
        if self.unchecked and self.model.training:
            self.unchecked, self.rehearsing = False, True
            kept = self._levels, self.passes
            self._levels = {
                name: Level(level.state, trial_lift(i))
                for i, (name, level) in enumerate(self._levels.items())
            }
            try:
                check_lifts(self, args, kwargs)
            finally:
                self._levels, self.passes = kept
                self.rehearsing = self.off = False

    def enter(self, block: _Block) -> Crossing:
        """A block is called. Outside of a call of the model, a second call begins a new pass."""
        recomputed = torch._C._current_graph_task_id() != -1  # in backward: by checkpointing
        if block.name in self._called and not getattr(_here, "roots", 0) and not recomputed:
            self.begin()
        self._called.add(block.name)
        lift = self._levels[block.name].lift
        if not self.sampling:
            return Crossing(block.name, lift)
        return Crossing(block.name, lift, Sight(self, block.name, block.module, lift))

    # Watcher

    def covers(self, params: list[Tensor]) -> bool:
        return any(id(p) in self._params for p in params)

    def peak(self) -> Any:
        seen = [(r.inner, self._levels[name].lift) for name, r in self.records.items()]
        top = largest(peak if peak is NAN else peak * lift for peak, lift in seen)
        return top.clamp(min=0.0) if isinstance(top, Tensor) else top

    def ended(self, reading: Reading, scale: Any) -> None:
        # Where an answer would have to be waited for, the next turn comes in its time.
        self.again = reading.nonfinite is True
        if not self.looked:
            return
        seen, used, dead = Record.read(self.records, scale, reading.loss_nonfinite)
        self._unread = self.records
        self.forget()
        if dead:
            return
        self.windows += 1
        searching = not self.settled and self.windows < _TRIES
        moved = learn(self.rule, self._levels, seen, used, searching)
        self.settled = self.settled or not moved or not searching
        self.again |= moved

    def forget(self) -> None:
        self.records, self.looked = {}, False

    def discard(self) -> None:
        self._unread = {}

    def scaled(self, loss: Tensor) -> None:
        """No gradient may get into a block but through its border: else it lacks the lift."""
        if self.unwalked:
            self.unwalked = False
            check_borders(loss)

    def samples(self) -> dict[str, dict[str, Any]]:
        """Shares of the gradient at each block's output, as lifted."""
        unread, self._unread = self._unread, {}
        return {
            name: record.described() for name, record in unread.items() if record.part is not None
        }

    # state

    def state_dict(self) -> dict[str, Any]:
        """Lifts and what they were found from, and when to look again."""
        return {
            "schema": SCHEMA,
            "passes": self.passes,
            "windows": self.windows,
            "settled": self.settled,
            "again": self.again,
            "blocks": dump(self.rule, self._levels),
        }

    def load_state_dict(self, state: Any) -> None:
        """Everything is checked before anything is changed."""
        if not isinstance(state, dict) or state.get("schema") != SCHEMA:
            raise StateError(f"this is no layerwise state of schema {SCHEMA}: {state!r:.80}")
        for name, kind in (("passes", int), ("windows", int), ("settled", bool), ("again", bool)):
            value = state.get(name)
            if type(value) is not kind or value < 0:
                raise StateError(f"{name} is {value!r}, expected {kind.__name__}")
        levels = load(self.rule, list(self._levels), state.get("blocks"))
        self._levels = levels
        self.passes, self.windows = state["passes"], state["windows"]
        self.settled, self.again = state["settled"], state["again"]
        self.records, self._unread, self.looked = {}, {}, False

    def remove(self) -> None:
        """The model is as it was before."""
        self.off = True
        for wrapper in [*self._blocks, *([self._root] if self._root else [])]:
            wrapper.unwrap()
        _watchers.discard(self)


class _Wrapper:
    """Stands where a module's `forward` was: hooks of the module stay outside."""

    def __init__(self, owner: Layerwise, module: nn.Module) -> None:
        self.owner, self.module = owner, module
        self.former = module.__dict__.get("forward")
        self.plain = self.former or types.MethodType(type(module).forward, module)
        module.__dict__["forward"] = self

    def unwrap(self) -> None:
        if self.module.__dict__.get("forward") is self:  # else somebody wrapped it once more
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
        self.owner.rehearse(args, kwargs)
        self.owner.begin()
        _here.roots = getattr(_here, "roots", 0) + 1
        try:
            return self.plain(*args, **kwargs)
        finally:
            _here.roots -= 1


class _Block(_Wrapper):
    """The border around a block."""

    lifts = True

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
        around = getattr(_here, "crossing", None)
        if around is not None:  # called by another block: a part of it
            with around.weights_of(self.module):
                return self.plain(*args, **kwargs)
        if self.name == "":
            self.owner.rehearse(args, kwargs)
            self.owner.begin()
        crossing = self.owner.enter(self)
        args, kwargs = mapped(args, crossing.enter), mapped(kwargs, crossing.enter)
        _here.crossing = crossing
        try:
            with crossing.weights_of(self.module), crossing.looking(self.module):
                out = self.plain(*args, **kwargs)
        finally:
            _here.crossing = None
        crossing.write_back()
        return mapped(out, crossing.leave)
