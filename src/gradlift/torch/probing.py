"""`probe`: looks at the float16 gradients that flow between modules, on sampled steps only.

Overflow starts in activation gradients, which no parameter shows before it is too late. What the
probes saw goes into `Reading.probe_amax`, and so into the rule.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MisuseError, SettingsError, warn
from ..reading import NAN, Reading
from .nested import tensors
from .scaler.statistics import describe

SAMPLED = 2**16  # elements of a gradient that its shares are taken from; its peak is of all
_PATIENCE = 3  # passes that show nothing, until the next turn has to be waited for
_FAR = 12  # nodes of the graph behind a module's output: its own, of an ordinary layer
_CAST = "ToCopyBackward0"
_LEAF = "AccumulateGrad"


class GradientWatcher:
    """Looks at gradients inside a network; every `GradScaler` reads all that `watch` has added."""

    looked = False
    """Was anything looked at since the last window ended? Nothing else is read if not."""
    again = False
    """Is the next pass to be looked at, whatever its number?"""
    owner: Any = None
    """Whose loss was scaled last: what is seen carries that scale."""

    def covers(self, params: list[Tensor]) -> bool:
        """Are these parameters of the watched network?"""
        raise NotImplementedError

    def peak(self) -> Any:
        """The largest |float16 gradient| of this window, as scaled: a number, or a 0-d tensor."""
        raise NotImplementedError

    def ended(self, reading: Reading, scale: Any) -> None:
        """A window is over (or a try, before the next one), whose gradients carried `scale`."""

    def forget(self) -> None:
        """Drops what was seen in this window: it carried another scale."""

    def scaled(self, loss: Tensor) -> None:
        """A loss of the watched network, or another one, is about to be differentiated."""

    def samples(self) -> dict[str, dict[str, Any]]:
        """Shares by module, for the journal; empty if there is nothing new."""
        return {}

    def discard(self) -> None:
        """Drops what is not recorded yet."""


watchers: weakref.WeakKeyDictionary[GradientWatcher, None] = weakref.WeakKeyDictionary()
"""In the order in which they were added."""


def watch(watcher: GradientWatcher) -> None:
    """From now on every `GradScaler` reads it."""
    watchers[watcher] = None


def unwatch(watcher: GradientWatcher) -> None:
    """The reverse."""
    watchers.pop(watcher, None)


def claim(owner: Any, loss: Tensor) -> None:
    """`owner` scales a loss: what backward shows from now on carries its scale, and no other's."""
    for w in list(watchers):
        if w.owner is not owner:
            w.forget()
            w.owner = owner
        w.scaled(loss)


def release(owner: Any) -> None:
    """The owner begins a new window: what was seen and not read is dropped."""
    for w in list(watchers):
        if w.owner is owner:
            w.forget()
            w.owner = None


def probed(owner: Any, params: list[Tensor]) -> Any:
    """The largest peak that was seen in this window; `NAN` itself if nothing was looked at."""
    seen = [w for w in list(watchers) if w.looked and w.owner is owner and w.covers(params)]
    return largest(w.peak() for w in seen)


def window_ended(owner: Any, reading: Reading, scale: Any, retry: bool) -> None:
    """Ends a window for the watchers that looked; after an overflow or before a retry for all, so
    that they look at the next pass. What a try showed that is done again is not recorded."""
    bad, params = reading.nonfinite is True, owner.params()
    for w in list(watchers):
        looked = w.looked and w.owner is owner
        if (looked or bad or retry) and w.covers(params):
            w.ended(reading, scale)
            if retry:
                w.again = True
                w.discard()


def samples(params: list[Tensor]) -> dict[str, dict[str, Any]]:
    """New shares by module, of the networks with these parameters.

    Where two watchers have seen one module, what the first of them found is kept, and the second
    adds what the first does not have: a block's lift beside a probe's shares.
    """
    found: dict[str, dict[str, Any]] = {}
    for w in list(watchers):
        for name, shares in w.samples().items() if w.covers(params) else ():
            found[name] = {**shares, **found.get(name, {})}
    return found


def largest(peaks: Iterable[Any]) -> Any:
    """
    >>> largest([1.0, NAN, 3.0]), largest([]) is NAN
    (3.0, True)
    """
    top: Any = NAN
    for peak in peaks:
        if peak is NAN:
            continue
        if top is NAN:
            top = peak
        elif isinstance(peak, Tensor) or isinstance(top, Tensor):
            tensor, other = (peak, top) if isinstance(peak, Tensor) else (top, peak)
            # Numbers are filled in where the tensor is: sending them there would wait.
            top = torch.maximum(tensor, other) if isinstance(other, Tensor) else tensor.clamp(other)
        else:
            top = max(top, peak)
    return top


def probe(model: nn.Module, every: int = 100) -> ModuleProbe:
    """Watches the gradients between `model`'s modules, in one of `every` training passes.

    Nothing else is to be done: each `GradScaler` that steps the model's parameters reads it. A
    pass that is not looked at costs one test. No bit of training changes.

    >>> from gradlift.torch import GradScaler
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> watched = probe(model, every=10)
    >>> optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    >>> with torch.autocast("cpu", torch.float16):
    ...     loss = model(torch.ones(8, 4)).float().mean()
    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> list(watched.seen)
    ['1', '0']
    >>> watched.seen["1"]["amax"]  # 2^16 / 8
    8192.0
    """
    return ModuleProbe(model, every)


def checked_every(every: Any) -> int:
    """How often to look: SettingsError unless it is a whole number, 1 or more."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingsError(f"every is {every!r}, expected a whole number, 1 or more")
    return every


class ModuleProbe(GradientWatcher):
    """What `probe` returns; `remove()` ends it. The model keeps it alive."""

    def __init__(self, model: nn.Module, every: int = 100) -> None:
        self.every = checked_every(every)
        if not isinstance(model, nn.Module):
            raise MisuseError(f"probe() wants a torch.nn.Module, this is {type(model).__name__}")
        self.calls = 0
        self.fruitless = 0
        """Passes in a row that were to be looked at, and showed nothing."""
        self.failed = False
        self.found: dict[str, list[tuple[Any, Tensor, int]]] = {}
        """By module: peak, some of the elements, and how many there are, of each gradient."""
        self._seen: dict[str, dict[str, Any]] = {}
        self._unread: dict[str, list[tuple[Any, Tensor, int]]] = {}
        self._model = weakref.ref(model)
        self._params = {id(p) for p in model.parameters()}
        self._handles: list[Any] = []
        self._hooked: set[tuple[Any, int]] = set()  # a container returns what its last child did
        self._first = model.register_forward_pre_hook(self._before)
        watch(self)

    # hooks

    def _before(self, module: nn.Module, args: Any) -> None:
        """At each call of the model: is it this one's turn?"""
        if torch.compiler.is_compiling():
            return
        if module is not self._model() or not torch.is_grad_enabled():
            return
        turn = self.calls % self.every == 0 or self.again
        self.calls += 1
        if turn:  # a pass that is never differentiated shows nothing: then it is the next one's
            self.fruitless += 1
            self.again = self.fruitless < _PATIENCE
            self._attach(module)

    def _attach(self, model: nn.Module) -> None:
        self._detach()  # a pass that failed may have left some
        self._params = {id(p) for p in model.parameters()}
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            label = name or type(model).__name__
            hook = self._after(label, leaf=not any(module.children()))
            self._handles.append(module.register_forward_hook(hook))
        # Last, so that the model's own output has been seen when all of them go.
        last = model.register_forward_hook(lambda *_: self._detach(), always_call=True)
        self._handles.append(last)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooked.clear()

    def _after(self, name: str, *, leaf: bool) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for t in tensors(output):
                place = (t.grad_fn, t.output_nr)
                if t.grad_fn is None or place in self._hooked:
                    continue
                self._hooked.add(place)
                if t.dtype is torch.float16:
                    t.register_hook(lambda g: self._look(name, g))
                if leaf:
                    stops = {x.grad_fn for x in tensors(args) if x.grad_fn is not None}
                    for cast in _casts(t.grad_fn, stops):
                        cast.register_prehook(lambda grads: self._look(name, grads[0]))

        return hook

    def _look(self, name: str, g: Tensor | None) -> None:
        """In backward. A gradient that never was float16 cannot overflow there."""
        if g is None or g.dtype is not torch.float16 or g.numel() == 0:
            return
        try:
            flat = g.detach().reshape(-1)
            part = flat[:: -(-g.numel() // SAMPLED)].clone()
            seen = peak_of(flat), part, g.numel()
        except RuntimeError as error:  # inside vmap, or a nested tensor: not worth a broken run
            if not self.failed:
                self.failed = True
                warn(f"probe: could not look at {name}: {error!r:.200}")
            return
        self.found.setdefault(name, []).append(seen)
        self.looked, self.again, self.fruitless = True, False, 0

    # What a GradScaler reads

    def covers(self, params: list[Tensor]) -> bool:
        return self._model() is not None and any(id(p) in self._params for p in params)

    def peak(self) -> Any:
        return largest(peak for each in self.found.values() for peak, _, _ in each)

    def ended(self, reading: Reading, scale: Any) -> None:
        # Where an answer would have to be waited for, the next turn comes in its time.
        if reading.nonfinite is True:
            self.again, self.fruitless = True, 0
        if self.found:
            self._unread = self.found
        self.forget()

    def forget(self) -> None:
        self.found, self.looked = {}, False

    def discard(self) -> None:
        self._unread = {}

    @property
    def seen(self) -> dict[str, dict[str, Any]]:
        """Shares by module, of the last pass that was looked at: the first reached by backward in
        front."""
        unread, self._unread = self.found or self._unread, {}
        if unread:
            self._seen = {name: _described(each) for name, each in unread.items()}
        return self._seen

    def samples(self) -> dict[str, dict[str, Any]]:
        return self.seen if self.found or self._unread else {}

    def remove(self) -> None:
        """Ends it."""
        self._detach()
        self._first.remove()
        unwatch(self)

    # A copy of the model takes its hooks along; this one goes on with the original only.

    def __deepcopy__(self, memo: Any) -> ModuleProbe:
        return self

    def __reduce__(self) -> Any:
        return _Gone, ()


class _Gone:
    """What is left of a probe in a pickled model: a hook that does nothing."""

    def _before(self, module: nn.Module, args: Any) -> None:
        return None


def _casts(node: Any, stops: set[Any]) -> list[Any]:
    """Where a layer's float32 input was cast to float16: there the gradient still is float16.

    A parameter's cast is left out: its gradient is looked at anyway.
    """
    found, queue, seen = [], [node], set(stops)
    while queue and len(seen) < _FAR + len(stops):
        at = queue.pop(0)
        if at is None or at in seen:
            continue
        seen.add(at)
        behind = [n for n, _ in at.next_functions]
        if at.name() == _CAST:
            if not any(n is not None and n.name().endswith(_LEAF) for n in behind):
                found.append(at)
            continue
        queue.extend(behind)
    return found


def _described(each: list[tuple[Any, Tensor, int]]) -> dict[str, Any]:
    peaks = [float(peak) for peak, _, _ in each]
    shares = describe(torch.cat([part for _, part, _ in each]))
    return {**shares, "elements": sum(n for _, _, n in each), "amax": max(peaks)}


def peak_of(flat: Tensor) -> Any:
    """The largest |g|, inf if any is not finite; on a device it stays there."""
    if flat.device.type != "cpu":
        return flat.abs().amax().float().nan_to_num(nan=math.inf)
    low, high = torch.aminmax(flat)
    top = max(-low.item(), high.item())
    return math.inf if math.isnan(top) else top
