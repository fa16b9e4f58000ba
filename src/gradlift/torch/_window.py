"""One optimizer between two updates: what was found of its gradients, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..reading import Reading
from ..verdict import Cause, Culprit, StepResult, Verdict
from ._agree import NOT_TAKEN
from ._circle import ALONE, SAME, Circle
from ._inspect import Look, look
from ._masters import MasterWeights


@dataclass
class Window:
    """One optimizer between two updates."""

    optimizer: Any
    params: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    """`.grad` of each parameter when it was looked at."""
    grads: list[Tensor] = field(default_factory=list)
    """Tensors to look at; of a gradient that is spread over ranks, this rank's part."""
    circle: Circle = ALONE
    """The ranks that decide together about it."""
    look: Look | None = None
    lengths: list[tuple[float, float]] = field(default_factory=list)
    """Norms of its parts, each with its weight among the ranks."""
    reading: Reading | None = None
    loss_known: Any = False
    """Was the loss seen, by any rank of the circle?"""
    told: Any = 0
    """Of a culprit, by the rank that has it."""
    culprits: tuple[Culprit, ...] = ()
    calls: int = -1
    """How many losses had been scaled when the gradients were looked at."""
    just_read: bool = False
    """They were looked at in the call that is still running."""
    sampled: bool = False
    unscaled: bool = False
    coefficient: Any = 1.0
    """The clip coefficient that `step` has still to apply."""
    norm: Any = math.nan
    has_norm: bool = False
    deferred: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """What `step` was called with, where `update` is to carry it out."""
    done: bool = False
    """The optimizer has moved the weights already: it took a closure."""
    stepped: bool = False
    verdict: Verdict | None = None
    cause: Cause = Cause.NONE
    result: StepResult | None = None

    def look_at(self, inverse: float, full: Set[int], *, norm: bool, amax: bool) -> Look:
        """The CPU's look, by kind where parameters differ: in what they count among the ranks, and
        in whether they are a part of amax (those at the positions `full` are not)."""
        circle = self.circle
        if not full and circle.common is not None:
            found = look(self.grads, inverse, amax=amax, norm=norm)
            self.lengths = [(circle.common, found.norm)]
            return found
        kinds: dict[tuple[bool, float], list[Tensor]] = {}
        for i, (g, weight) in enumerate(zip(self.one_by_one(), circle.of(self.params))):
            kinds.setdefault((i in full, weight), []).append(g)
        parts = {
            kind: look(grads, inverse, amax=amax and not kind[0], norm=norm)
            for kind, grads in sorted(kinds.items())
        }
        self.lengths = [(weight, found.norm) for (_, weight), found in parts.items()]
        bad = any(found.nonfinite for found in parts.values())
        total = math.hypot(*(found.norm for found in parts.values()))
        peaks = [found.amax for (no_part, _), found in parts.items() if not no_part]
        return Look(bad, math.nan if bad else total, max(peaks, default=0.0 if amax else math.inf))

    def one_by_one(self) -> list[Tensor]:
        """The gradients to look at, one for each parameter."""
        if not isinstance(self.optimizer, MasterWeights):
            return self.grads
        if not self.unscaled:
            return self.held
        masters = [self.optimizer._master(p).grad for p in self.params]
        return [g if m is None else m for g, m in zip(self.held, masters)]

    def own_and_shared(self) -> tuple[float, float]:
        """Norms of what only some ranks hold, weighted, and of what all hold; -1 if not taken."""
        own = math.hypot(*(math.sqrt(w) * n for w, n in self.lengths if w != SAME))
        same = [n for w, n in self.lengths if w == SAME]
        shared = same[0] if len(same) == 1 else math.hypot(*same)
        return NOT_TAKEN if math.isnan(own) else own, NOT_TAKEN if math.isnan(shared) else shared
