"""The order in which a script calls what makes up a step, each with the script's own line.

    zero_grad -> autocast -> scale -> backward -> unscale_ -> clip_grad_norm_ -> step -> update

A window ends with a scaler's update, or with the step of an optimizer that has no scaler. An order
is written when it is first seen, and how often it was seen when the recording ends.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from ...journal import Call, Recorder, current
from ..places import Places

_MOST_ORDERS = 50
_LONGEST = 64  # calls in a window; a window without an end is cut there


_SCALAR = {"MulBackward0", "DivBackward0", "ToCopyBackward0", "SumBackward0", "ViewBackward0"}


class CallOrder:
    """The calls of the current window, and every order that was seen.

    >>> import os
    >>> from gradlift.journal import Journal
    >>> calls = CallOrder(Recorder(Journal(os.devnull)))
    >>> for _ in range(2):
    ...     for name in ("backward", "step"):
    ...         calls.add(name)
    ...     calls.end(0)
    >>> [([call.name for call in order], count) for order, (_, count) in calls.orders.items()]
    [(['backward', 'step'], 2)]
    """

    def __init__(self, recorder: Recorder, places: Places | None = None) -> None:
        self.recorder = recorder
        self.places = places or Places()
        self.window: list[Call] = []
        self.orders: dict[tuple[Call, ...], tuple[int, int]] = {}
        """First step and count of each order."""
        self.labels: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.scaled: list[Any] = []
        """Weak references to the outputs of scale() in this window."""
        self.nodes: list[Any] = []
        """The nodes that made them: a sum of scaled losses is scaled as well."""
        self.cut = False
        self.windows = 0
        self.stepped: set[str] = set()
        """Optimizers that stepped since the last backward pass."""
        self.used: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """The first gradient of each optimizer after its step: its id and version."""
        self.kept: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """That gradient's id, where backward came before it was cleared."""
        self.failure = ""
        self._aside = False

    def listening(self) -> bool:
        """Not in a forked child, nor after the end, nor to gradlift's own calls."""
        return not self._aside and current() is self.recorder

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, calls are gradlift's own and are not noted."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def failed(self, error: Exception) -> None:
        """A call that could not be noted is left out."""
        self.failure = self.failure or f"could not note every call: {error!r:.200}"

    def add(self, name: str, who: Any = None, fact: str = "") -> None:
        """Notes a call."""
        window = self.window
        if len(window) >= _LONGEST:
            self._shorten()
        label = "" if who is None else self.label(who)
        window.append(Call(name, self.places.of(sys._getframe(2)), label, fact))

    def add_step(self, name: str, optimizer: Any, fact: str = "") -> None:
        """A step. Is it the second on the same gradients? Were they added to older ones?"""
        label = self.label(optimizer)
        if not fact:
            kept, g = self.kept.pop(optimizer, None), first_gradient(optimizer)
            if label in self.stepped:
                fact = "again"
            elif kept is not None and g is not None and id(g) == kept:
                fact = "kept"
        self.stepped.add(label)
        self.window.append(Call(name, self.places.of(sys._getframe(2)), label, fact))

    def stepped_with(self, optimizer: Any) -> None:
        """After a step: which gradient has been used, and should be cleared now."""
        g = first_gradient(optimizer)
        if g is not None and not g.is_inference():
            self.used[optimizer] = id(g), g._version

    def add_backward(self, losses: list[Tensor]) -> None:
        """A backward pass: is it of a scaled loss, of a divided one?"""
        self.stepped.clear()
        if self.used:
            for optimizer, stamp in list(self.used.items()):
                g = first_gradient(optimizer)
                if g is not None and (id(g), g._version) == stamp:
                    self.kept[optimizer] = stamp[0]
            self.used.clear()
        scaled = self.is_scaled(losses)
        divided = any(_is_divided(t.grad_fn, scaled) for t in losses)
        fact = "scaled divided" if scaled and divided else "scaled" if scaled else ""
        self.add("backward", fact=fact or "divided" * divided)

    def add_zero_grad(self, name: str, optimizer: Any) -> None:
        """Gradients are cleared: of one optimizer, or of a model."""
        if optimizer is None:
            self.kept.clear()
        else:
            self.kept.pop(optimizer, None)
        self.add(name, optimizer)

    def end(self, step: int) -> None:
        """Ends a window. Calls that come after it belong to the next."""
        if len(self.window) > 8:
            self._shorten()
        order = tuple(self.window)
        self.window, self.scaled, self.nodes, self.cut = [], [], [], False
        seen = self.orders.get(order)
        if seen is not None:
            self.orders[order] = seen[0], seen[1] + 1
        elif len(self.orders) < _MOST_ORDERS:
            self.orders[order] = step, 1
            self.recorder.calls(step, order, 1)
            self.places.write_source(self.recorder)

        self.windows += 1
        if self.windows >= 16 and self.windows & (self.windows - 1) == 0:
            self._write_counts()  # a run that is still going on has shares too

    def close(self, step: int) -> None:
        """Writes a window that has no end, and how often each order was seen."""
        if self.window:
            self.end(step)
        self._write_counts()

    def _write_counts(self) -> None:
        for order, (first, count) in self.orders.items():
            if count > 1:
                self.recorder.calls(first, order, count)

    def _shorten(self) -> None:
        """Writes repeated calls, such as those of micro-batches, once."""
        window = self.window
        for length in range(1, 9):
            at = 0
            while at + 2 * length <= len(window):
                first = window[at : at + length]
                end = at + length
                while window[end : end + length] == first:
                    end += length
                if end > at + length:
                    times = (end - at) // length
                    window[at:end] = [call._replace(times=call.times * times) for call in first]
                at += 1
        if len(window) >= _LONGEST:
            del window[_LONGEST // 2 :]
            self.cut = True

    # What a call is about

    def label(self, who: Any) -> str:
        """A short name of an optimizer or schedule: its class, with a number from the second on.

        Numbers are given in the order in which they are seen.
        """
        label = self.labels.get(who)
        if label is None:
            kind = type(who).__name__
            n = 1 + sum(type(other).__name__ == kind for other in self.labels)
            label = self.labels[who] = kind if n == 1 else f"{kind} {n}"
        return label

    def is_scaled(self, tensors: list[Tensor]) -> bool:
        """Do these losses carry the scale?"""
        if not self.scaled:
            return False
        known = {id(t) for r in self.scaled if (t := r()) is not None}
        if all(id(t) in known for t in tensors):
            return True
        return any(_reaches(t.grad_fn, self.nodes) for t in tensors)

    def note_scaled(self, output: Any) -> None:
        if isinstance(output, Tensor):
            self.scaled.append(ref(output))
            self.nodes.append(output.grad_fn)


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def first_gradient(optimizer: Any) -> Tensor | None:
    """The gradient of the first parameter that has one."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            g: Tensor | None = p.grad
            if g is not None:
                return g
    return None


def _is_divided(node: Any, scaled: bool) -> bool:
    """Is a loss divided, or multiplied by a number, before (or after) it is scaled?"""
    found = 0
    for _ in range(4 + scaled):
        name = type(node).__name__
        found += name in ("MulBackward0", "DivBackward0")
        if node is None or name not in _SCALAR:
            break
        node = node.next_functions[0][0]
    return found > scaled


def _reaches(node: Any, wanted: list[Any]) -> bool:
    """Is one of `wanted` at most a few operations before `node`?"""
    level = [node]
    for _ in range(8):
        if any(n is not None and any(n is w for w in wanted) for n in level):
            return True
        level = [n for at in level if at is not None for n, _ in at.next_functions][:64]
    return False
