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

from ..errors import MisuseError, SettingsError
from ..reading import NAN, Reading
from ._statistics import describe

SAMPLED = 2**16  # elements of a gradient that its shares are taken from; its peak is of all
_FAR = 12  # nodes of the graph behind a module's output: its own, of an ordinary layer
_CAST = "ToCopyBackward0"
_LEAF = "AccumulateGrad"


class Watcher:
    """Somebody who looks at gradients inside a network; a `GradScaler` asks all that `watch`."""

    looked = False
    """Was anything looked at since the last window ended? Nothing else is asked if not."""

    def covers(self, params: list[Tensor]) -> bool:
        """Are these parameters of the watched network?"""
        raise NotImplementedError

    def peak(self) -> Any:
        """The largest |float16 gradient| of this window, as scaled: a number, or a 0-d tensor."""
        raise NotImplementedError

    def ended(self, reading: Reading, scale: Any) -> None:
        """A window is over (or a try, before the next one), whose gradients carried `scale`."""

    def samples(self) -> dict[str, dict[str, Any]]:
        """Shares by module, for the journal; empty if there is nothing new."""
        return {}


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch(watcher: Watcher) -> None:
    """From now on every `GradScaler` asks it."""
    _watchers.add(watcher)


def watching(params: list[Tensor]) -> list[Watcher]:
    """Those that have looked at the network of these parameters."""
    return [w for w in _watchers if w.looked and w.covers(params)] if _watchers else []


def probed(params: list[Tensor]) -> Any:
    """The largest peak that anybody saw in this window; `NAN` itself if nobody looked."""
    return largest(w.peak() for w in watching(params))


def tell(params: list[Tensor], reading: Reading, scale: Any) -> None:
    """A window is over: those who looked hear of it, and all who might look at the next one."""
    bad = reading.nonfinite is True
    for w in list(_watchers):
        if (w.looked or bad) and w.covers(params):
            w.ended(reading, scale)


def samples(params: list[Tensor]) -> dict[str, dict[str, Any]]:
    """What anybody has to say about the modules of these parameters, since it was last asked."""
    found: dict[str, dict[str, Any]] = {}
    for w in _watchers:
        for name, shares in w.samples().items() if w.covers(params) else ():
            found.setdefault(name, {}).update(shares)  # a block's lift beside a probe's shares
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


def probe(model: nn.Module, every: int = 100) -> Probe:
    """Watches the gradients between `model`'s modules, in one of `every` training passes.

    Nothing else is to be done: each `GradScaler` that steps the model's parameters hears of it. A
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
    return Probe(model, every)


class Probe(Watcher):
    """What `probe` returns; `remove()` ends it. The model keeps it alive."""

    def __init__(self, model: nn.Module, every: int = 100) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingsError(f"every is {every!r}, expected a whole number, 1 or more")
        if not isinstance(model, nn.Module):
            raise MisuseError(f"probe() wants a torch.nn.Module, this is {type(model).__name__}")
        self.every = every
        self.calls = 0
        self.again = False
        """Is the next pass to be looked at, whatever its number?"""
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
        if module is not self._model() or not (module.training and torch.is_grad_enabled()):
            return
        turn = self.calls % self.every == 0 or self.again
        self.calls += 1
        if turn:
            self.again = False
            self._attach(module)

    def _attach(self, model: nn.Module) -> None:
        self._detach()  # a pass that failed may have left some
        self._params = {id(p) for p in model.parameters()}
        for name, module in model.named_modules():
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
        flat = g.detach().reshape(-1)
        part = flat[:: -(-g.numel() // SAMPLED)].clone()
        self.found.setdefault(name, []).append((peak_of(flat), part, g.numel()))
        self.looked = True

    # Watcher

    def covers(self, params: list[Tensor]) -> bool:
        return self._model() is not None and any(id(p) in self._params for p in params)

    def peak(self) -> Any:
        return largest(peak for each in self.found.values() for peak, _, _ in each)

    def ended(self, reading: Reading, scale: Any) -> None:
        # Where an answer would have to be waited for, the next turn comes in its time.
        self.again = isinstance(reading.nonfinite, bool) and reading.nonfinite
        self._unread, self.found, self.looked = self.found, {}, False

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
        _watchers.discard(self)

    # A copy of the model takes its hooks along; this one goes on with the original only.

    def __deepcopy__(self, memo: Any) -> Probe:
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


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []
