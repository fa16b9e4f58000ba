"""How large each block's gradients are, and the lifts that make them alike.

T_b   the scale that would suit block b alone: a `Headroom` rule's, fed with b's own peaks
L_b = min(T_b / min T, 2^96)     at least 1: the block with the largest gradients has none
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import SettingsError, StateError
from ..formats import FP16
from ..reading import Reading
from ..rules import Headroom, ScaleState, parse
from ..rules._rule import LARGEST, SMALLEST, is_power_of_two

MAX_LIFT = 2.0**96  # a float16 gradient divided by it is still a normal float32 number
_CLEAR = 2.0**-10  # a float16 peak below it may be a remnant of something larger
_UNSEEN = 2.0**8  # room for what could not be seen: a weight's gradient sums over a batch


class Seen(NamedTuple):
    """One block in one window, with the scale but without the lift; in numbers."""

    inner: float
    """The largest |float16 gradient| inside it; not finite if any was not."""
    border: float
    """The largest |gradient| that arrived at its outputs, in float32: there nothing is lost."""


@dataclass
class Level:
    """What is known of one block."""

    state: ScaleState
    lift: float = 1.0
    known: bool = False
    """Have its gradients been seen clearly?"""
    rough: bool = False
    """If not: is there an estimate at least?"""


def tracker(rule: Any, every: int) -> Headroom:
    """The rule that follows one block's peaks, once in `every` steps and without bounds."""
    found = parse(rule)
    if not isinstance(found, Headroom):
        raise SettingsError(
            f"rule is {str(found)!r}, expected one that follows magnitudes: 'auto', "
            "'auto:cautious' or a gradlift.rules.Headroom"
        )
    leak = min(found.leak * every, 2**20)
    return dataclasses.replace(found, min_scale=SMALLEST, max_scale=LARGEST, leak=leak)


def learn(
    rule: Headroom, levels: dict[str, Level], seen: dict[str, Seen], scale: float, guess: bool
) -> bool:
    """Moves the levels by what one window showed, and the lifts with them; did a lift move far?

    `seen` is in the order in which backward came by: the first that is not finite is to blame.
    With `guess`, a block where nothing arrived gets the lift of the one behind it: what was in
    the way there will be gone next time.
    """
    bad = [name for name, s in seen.items() if not math.isfinite(s.inner + s.border)]
    culprit = bad[0] if bad else None
    for name, s in seen.items():
        level, peak = levels[name], s.inner or s.border
        clear = s.inner * level.lift >= _CLEAR
        if name in bad:
            if name != culprit or not math.isfinite(s.border):
                continue  # it came from elsewhere
            clear, peak = False, s.border
            if s.border * level.lift <= FP16.max:  # grew too large inside, by how much is unknown
                used = min(max(scale * level.lift, SMALLEST), LARGEST)
                blind = Reading(nonfinite=True, amax=math.inf)
                level.state = rule.advance(level.state._replace(scale=used), blind)
                level.rough = True
                continue
        if not peak:
            continue
        if clear or level.known:
            start = level.state if level.known else rule.init()
            level.state, level.known = _advanced(rule, start, peak / scale), True
        else:
            level.state, level.rough = _advanced(rule, rule.init(), peak / scale * _UNSEEN), True
    return _lift(levels, seen, guess) or bool(bad)


def _advanced(rule: Headroom, state: ScaleState, peak: float) -> ScaleState:
    """After a gradient of this size, with neither scale nor lift."""
    return rule.advance(state, Reading(nonfinite=False, amax=peak * state.scale))


def _lift(levels: dict[str, Level], seen: dict[str, Seen], guess: bool) -> bool:
    """Lifts from levels; True if one moved by more than a bit, or had to be guessed."""
    known = [level.state.scale for level in levels.values() if level.known or level.rough]
    if not known:
        return guess
    least, moved = min(known), False
    for level in levels.values():
        if level.known or level.rough:
            lift = min(level.state.scale / least, MAX_LIFT)
            moved |= not 0.5 <= lift / level.lift <= 2
            level.lift = lift
    behind = 1.0
    for name in seen:
        level = levels[name]
        if not (level.known or level.rough):
            level.lift = max(1.0, behind / _UNSEEN) if guess else 1.0
            moved |= guess
        else:
            behind = level.lift
    return moved


def dump(rule: Headroom, levels: dict[str, Level]) -> dict[str, Any]:
    return {
        name: dataclasses.asdict(level) | {"state": rule.dump(level.state)}
        for name, level in levels.items()
    }


def load(rule: Headroom, names: list[str], data: Any) -> dict[str, Level]:
    """The levels in a dict made by `dump`, for exactly these blocks, or StateError."""
    if not isinstance(data, dict):
        raise StateError(f"the blocks of a layerwise state are a dict, not {type(data).__name__}")
    if set(data) != set(names):
        odd = sorted(map(str, set(data) ^ set(names)))
        raise StateError(
            f"this layerwise state has other blocks than this model (they differ in {odd[:5]}): "
            "call layerwise() with the blocks it was saved with"
        )
    levels = {}
    for name in names:
        entry = data[name]
        if not isinstance(entry, dict) or set(entry) != {"lift", "known", "rough", "state"}:
            raise StateError(f"block {name!r} is {entry!r:.80}, expected lift, known, rough, state")
        lift, known, rough = entry["lift"], entry["known"], entry["rough"]
        number = isinstance(lift, (int, float)) and not isinstance(lift, bool)
        if not number or not 1 <= lift <= MAX_LIFT or not is_power_of_two(lift):
            raise StateError(
                f"the lift of block {name!r} is {lift!r}, expected a power of two from 1 to 2^96"
            )
        if not isinstance(known, bool) or not isinstance(rough, bool):
            raise StateError(f"known and rough of block {name!r} are {known!r} and {rough!r}")
        levels[name] = Level(rule.load(entry["state"]), float(lift), known, rough)
    return levels
