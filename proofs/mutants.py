"""Faults that the proofs must find: each replaces one piece of a rule's own source."""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradlift.rules.backoff import Backoff, LateBackoff, WideningBackoff
from gradlift.rules.base import Rule
from gradlift.rules.headroom import Headroom


class Mutant(NamedTuple):
    """`old` in the source of `owner.method` becomes `new`."""

    owner: type[Rule]
    method: str
    old: str
    new: str

    @property
    def what(self) -> str:
        return f"{self.owner.__name__}.{self.method}: {self.old}  ->  {self.new}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        original = vars(self.owner)[self.method]
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, self.what
        source = source.replace(self.old, self.new)
        source = source.replace("super()", f"super({self.owner.__name__}, self)")
        names: dict[str, Any] = dict(vars(sys.modules[self.owner.__module__]))
        exec(source, names)
        made = names[self.method]
        setattr(self.owner, self.method, made)
        try:
            yield
        finally:
            setattr(self.owner, self.method, original)


MUTANTS = (
    # the flags, for every rule
    Mutant(Rule, "advance", "ns.and_(reading.nonfinite, loss_finite)", "reading.nonfinite"),
    Mutant(Rule, "advance", "clean = ns.and_(finite, loss_finite)", "clean = finite"),
    Mutant(Rule, "advance", "ns.where(checked, new, old)", "ns.where(checked, old, new)"),
    Mutant(Rule, "advance", "ns.where(clean, 0, state.skips + 1)", "state.skips + 1"),
    # Backoff
    Mutant(Backoff, "_respond", "ns.where(overflow, 0, state.clean)", "0"),
    Mutant(Backoff, "_respond", "state.clean + 1, ns", "state.clean, ns"),
    Mutant(Backoff, "_respond", "count >= self._interval", "count > self._interval"),
    Mutant(Backoff, "_respond", "grow = ns.and_(clean,", "grow = ns.or_(clean,"),
    Mutant(Backoff, "_respond", "ns.where(lower, self._lowered", "ns.where(overflow, self._grown"),
    Mutant(Backoff, "_respond", "ns.where(grow, 1 if", "ns.where(clean, 1 if"),
    Mutant(Backoff, "_grown", "ns.minimum", "ns.maximum"),
    Mutant(Backoff, "_lowered", "ns.maximum", "ns.minimum"),
    Mutant(Backoff, "_lowered", "self.backoff_factor", "1.0"),
    Mutant(Backoff, "_interval", "slow = state.scale <=", "slow = self.init_scale <="),
    Mutant(Backoff, "_lower", "state.left - 1", "state.left"),
    Mutant(Backoff, "_lower", "left <= 0", "left < 0"),
    Mutant(Backoff, "_lower", "ns.where(refill, self.hysteresis, left)", "left"),
    Mutant(Backoff, "_lower", "ns.minimum(steps, 2**20)", "steps + 2**31"),
    # its variants
    Mutant(LateBackoff, "_respond", "state.level < 0", "state.level <= 0"),
    Mutant(LateBackoff, "_respond", "ns.where(counts, due, state.scale)", "due"),
    Mutant(WideningBackoff, "_respond", "ns.maximum(state.level // 2, 1)", "state.level // 2"),
    Mutant(WideningBackoff, "_respond", "ns.minimum(state.level, 2**29)", "state.level"),
    # Headroom
    Mutant(Headroom, "_respond", "now - fall", "now + fall"),
    Mutant(Headroom, "_respond", "ns.minimum(jump * 2, 32)", "jump * 2"),
    Mutant(Headroom, "_respond", "ns.maximum(now - exponent, 1)", "now - exponent"),
    Mutant(
        Headroom,
        "_respond",
        "ns.minimum(ns.maximum(exponent, self._lowest), self._highest)",
        "ns.maximum(exponent, self._lowest)",
    ),
    Mutant(Headroom, "_respond", "ns.where(clean, 0, jump)", "0"),
    Mutant(Headroom, "_respond", "ns.where(informed, level, last)", "level"),
    Mutant(Headroom, "_respond", "self._top - level - gap", "self._top - level + gap"),
    Mutant(Headroom, "_respond", "ns.maximum(gap, proven)", "gap"),
)
