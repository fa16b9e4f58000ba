"""Proves what the rules promise, for every state and every reading: `make prove`.

The formulas are made from the rules' own source, by running `advance` on z3 expressions. A claim is
proved if its negation has no solution, and what is given has one. With `--mutants` deliberate
faults are put into the rules, one after the other, and each must be found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import z3

from gradlift.namespace import NOTHING
from gradlift.reading import NAN, Reading
from gradlift.rules import Backoff, Headroom, Rule, ScaleState, Static
from gradlift.rules.backoff import LateBackoff, WideningBackoff
from gradlift.rules.headroom import _BIT, _MOST
from gradlift.rules.presets import PRESETS, preset

from . import floats
from .mutants import MUTANTS
from .symbols import LEAST, MOST, SYMBOLS, Integer, Magnitude, Power, exponent

STEPS = 12  # of `Headroom`, unrolled
_COUNT = 2**30  # steps that a counter may reach: the proofs hold for runs up to here


class Claim(NamedTuple):
    rule: str
    what: str
    holds: Any
    given: list[Any]


class Step(NamedTuple):
    """One symbolic step of a rule."""

    before: ScaleState
    after: ScaleState
    nonfinite: Any
    loss_nonfinite: Any
    checked: Any
    computed: list[Any]
    given: list[Any]

    @property
    def overflow(self) -> Any:
        return z3.And(self.checked, self.nonfinite, z3.Not(self.loss_nonfinite))

    @property
    def clean(self) -> Any:
        return z3.And(self.checked, z3.Not(self.nonfinite), z3.Not(self.loss_nonfinite))


def rules() -> dict[str, Rule]:
    """Every preset whose numbers are powers of two, and settings that no preset has."""
    found: dict[str, Rule] = {"static": Static(1024.0)}
    for name in PRESETS:
        rule = preset(name)
        if not isinstance(rule, Backoff) or rule.powers_of_two:
            found[name] = rule
    found["hysteresis 4, refilled when clean"] = Backoff(hysteresis=4, hysteresis_refill="clean")
    found["hysteresis 3, refilled in streaks"] = Backoff(hysteresis=3, hysteresis_refill="streak")
    found["tolerance 1/20"] = Backoff(tolerance=0.05)
    found["growth 4, backoff 1/8"] = Backoff(growth_factor=4.0, backoff_factor=0.125)
    return found


def left_out() -> list[str]:
    return [n for n in PRESETS if n not in rules()]


def symbol(name: str) -> Any:
    return z3.Int(name)


def state_of(name: str) -> ScaleState:
    fields = ScaleState._fields[1:]
    numbers = [Integer(symbol(f"{f}{name}")) for f in fields]
    return ScaleState(Power(symbol(f"e{name}")), *numbers)


def invariant(rule: Rule, s: ScaleState) -> list[Any]:
    """What every reachable state satisfies, and every state that `load` accepts of a run."""
    low, high = exponent(rule.min_scale), exponent(rule.max_scale)
    e, clean, skips, left, level, spread, seen = (x.z for x in s)
    holds = [e >= low, e <= high, skips >= 0, skips < _COUNT, clean >= 0]
    if isinstance(rule, Headroom):
        holds += [clean <= 64, left == 0, z3.Or(seen == 0, seen == 1)]
        return [*holds, spread >= 0, spread <= _MOST, level >= -_MOST, level <= _MOST]
    holds += [clean < _COUNT, spread == 0]
    if isinstance(rule, Backoff):
        holds += [left >= 0, left <= rule.hysteresis]
        if not isinstance(rule, WideningBackoff):
            longest = max(rule.growth_interval, rule.recover_interval or 0)
            holds.append(clean <= longest)
        if isinstance(rule, WideningBackoff):
            holds += [level >= 1, level <= 2**30, seen == 0]
        elif isinstance(rule, LateBackoff):
            up, down = exponent(rule.growth_factor), exponent(rule.backoff_factor)
            holds += [z3.Or(level == 0, level == up, level == down), seen == 0]
        elif rule.tolerance:
            holds += [level >= 0, level <= 2**20, seen >= 0, seen <= 2**20]
        else:
            holds += [level == 0, seen == 0]
    else:
        holds += [left == 0, level == 0, seen == 0]
    return holds


def stepped(rule: Rule, before: ScaleState, name: str = "", amax: Any = None) -> Step:
    bad, loss_bad = z3.Bool(f"nonfinite{name}"), z3.Bool(f"loss_nonfinite{name}")
    checked = z3.Bool(f"checked{name}")
    given: list[Any] = []
    if amax is None:
        shown = symbol(f"shown{name}")  # of any 32 bits
        amax = Magnitude(shown)
        given = [shown >= LEAST // 2**15 + NOTHING, shown <= MOST // 2**15 + NOTHING]
    Integer.computed = []
    reading = Reading(bad, amax, loss_bad, checked, probe_amax=NAN)
    after = rule.advance(before, reading, SYMBOLS)
    after = ScaleState(*(Integer(x) if isinstance(x, int) else x for x in after))
    return Step(before, after, bad, loss_bad, checked, Integer.computed, given)


def same(a: ScaleState, b: ScaleState) -> Any:
    return z3.And(*(x.z == y.z for x, y in zip(a, b)))


def claims_of(name: str, rule: Rule) -> Iterator[Claim]:
    """What holds of one rule."""
    before = state_of("")
    s = stepped(rule, before)
    given = [*invariant(rule, before), *s.given]
    e, then = before.scale.z, s.after.scale.z
    low = exponent(rule.min_scale)

    def claim(what: str, holds: Any, *more: Any) -> Claim:
        return Claim(name, what, holds, [*given, *more])

    for number, part in enumerate(invariant(rule, s.after)):
        if number == 3:
            continue  # the number of skips has no bound but the run's length
        yield claim(
            f"a state stays a state ({number})",
            part,
            before.skips.z < _COUNT - 1,
            before.clean.z < _COUNT - 1,
        )
    fits = z3.And(*(z3.And(x >= LEAST, x <= MOST) for x in s.computed)) if s.computed else True
    yield claim("every integer fits 32 bits", fits)
    yield claim("it starts in a state", z3.And(*invariant(rule, wrapped(rule.init()))))
    bad = z3.Or(s.overflow, s.loss_nonfinite, z3.Not(s.checked))
    if not isinstance(rule, LateBackoff):  # which moves one step later, as MXNet does
        yield claim("a bad step never moves it up", then <= e, bad)
    yield claim("a non-finite loss keeps it", then == e, s.loss_nonfinite)
    yield claim(
        "a non-finite loss keeps its history",
        same(s.after._replace(skips=before.skips), before),
        s.loss_nonfinite,
    )
    yield claim("a clean step ends the count of skips", s.after.skips.z == 0, s.clean)
    yield claim(
        "a bad step is counted", s.after.skips.z == before.skips.z + 1, s.checked, z3.Not(s.clean)
    )
    yield claim("without gradients nothing changes", same(s.after, before), z3.Not(s.checked))
    if not isinstance(rule, (Static, LateBackoff)):
        ready: list[Any] = [e > low]
        if isinstance(rule, Backoff) and rule.hysteresis > 1:
            ready.append(before.left.z <= 1)
        if not (isinstance(rule, Backoff) and rule.tolerance):
            yield claim("an overflow moves it down", then < e, s.overflow, *ready)
    if isinstance(rule, Headroom):
        yield from searches(name, s, given)
    if type(rule) is Backoff:
        yield from growth(name, rule, s, given)
    if isinstance(rule, LateBackoff):
        yield from late(name, rule, s, given)
    again = stepped(rule, before)
    yield claim("equal readings keep two ranks equal", same(s.after, again.after))
    regains = isinstance(rule, Backoff) and not isinstance(rule, (LateBackoff, WideningBackoff))
    if regains and not rule.tolerance and rule.growth_factor == 2 and rule.backoff_factor == 0.5:
        yield from regained(name, rule, s, given)


def growth(name: str, rule: Backoff, s: Step, given: list[Any]) -> Iterator[Claim]:
    """It grows at the N-th clean step in a row, and at no other."""
    e, then, high = s.before.scale.z, s.after.scale.z, exponent(rule.max_scale)
    interval: Any = rule.growth_interval
    if rule.recover_below is not None:
        slow = e <= exponent(rule.recover_below)
        interval = z3.If(slow, rule.recover_interval, rule.growth_interval)
    last = interval + (rule.growth_late != "never") - 1  # clean steps before the one that grows
    up = e + exponent(rule.growth_factor)
    grown = z3.If(up <= high, up, high)
    counted = s.before.clean.z
    yield Claim(
        name, "it grows after N clean steps", then == grown, [*given, s.clean, counted == last]
    )
    yield Claim(
        name,
        "not before",
        z3.And(then == e, s.after.clean.z == counted + 1),
        [*given, s.clean, counted < last],
    )
    begins = 1 if rule.growth_late == "first" else 0
    yield Claim(
        name, "then it counts anew", s.after.clean.z == begins, [*given, s.clean, counted == last]
    )
    yield Claim(name, "an overflow ends the count", s.after.clean.z == 0, [*given, s.overflow])
    if rule.hysteresis > 1:
        left = s.before.left.z
        yield Claim(
            name,
            "an overflow uses up hysteresis",
            s.after.left.z == left - 1,
            [*given, s.overflow, left > 1],
        )
        yield Claim(name, "which holds the scale", then == e, [*given, s.overflow, left > 1])
        refill = [s.clean] if rule.hysteresis_refill != "growth" else [s.clean, counted == last]
        yield Claim(name, "and is refilled", s.after.left.z == rule.hysteresis, [*given, *refill])


def late(name: str, rule: LateBackoff, s: Step, given: list[Any]) -> Iterator[Claim]:
    """What an overflow showed takes effect with the next step that counts."""
    following = stepped(rule, s.after, " then")
    down = following.after.scale.z < s.after.scale.z
    counts = z3.And(following.checked, z3.Not(following.loss_nonfinite))
    low = exponent(rule.min_scale)
    yield Claim(
        name,
        "an overflow moves it down one step later",
        down,
        [*given, s.overflow, counts, s.after.scale.z > low, s.before.left.z <= 1],
    )

    held = [*given, s.checked, z3.Not(s.loss_nonfinite)]
    yield Claim(
        name,
        "it holds where nothing is due",
        s.after.scale.z == s.before.scale.z,
        [*held, s.before.level.z == 0],
    )


def searches(name: str, s: Step, given: list[Any]) -> Iterator[Claim]:
    """`Headroom` after an overflow."""
    fallen = s.before.scale.z - s.after.scale.z
    yield Claim(name, "one overflow costs 32 bits at most", fallen <= 32, [*given, s.overflow])
    yield Claim(name, "a search is noted", s.after.clean.z >= 1, [*given, s.overflow])


def regained(name: str, rule: Backoff, s: Step, given: list[Any]) -> Iterator[Claim]:
    """In a world where just the scales up to 2^safe are clean, a whole number of steps that are
    left falls with each step, until the scale is 2^safe: so it gets there, within that many."""
    safe = symbol("safe")
    low, high = exponent(rule.min_scale), exponent(rule.max_scale)
    world = [
        safe >= low,
        safe <= high,
        s.checked,
        z3.Not(s.loss_nonfinite),
        s.nonfinite == (s.before.scale.z > safe),
    ]
    longest = max(rule.growth_interval, rule.recover_interval or 0) + 1

    def left(state: ScaleState) -> Any:
        e = state.scale.z
        above = (e - safe) * (rule.hysteresis + 1) + state.left.z + 1
        below = (safe - e) * (longest + 1) - state.clean.z
        return z3.If(e == safe, 0, z3.If(e > safe, above, below))

    most = (high - low) * (longest + rule.hysteresis + 2) + rule.hysteresis + 1
    off = s.before.scale.z != safe
    yield Claim(
        name,
        "steps are left while it is not the largest safe one",
        left(s.before) > 0,
        [*given, *world, off, s.before.clean.z < longest],
    )
    yield Claim(
        name, "each step leaves fewer", left(s.after) < left(s.before), [*given, *world, off]
    )
    yield Claim(name, f"at most {most} steps are left", left(s.before) <= most, [*given, *world])


def wrapped(state: ScaleState) -> ScaleState:
    return ScaleState(Power(exponent(state.scale)), *(Integer(int(x)) for x in state[1:]))


def unrolled(name: str, rule: Headroom) -> Iterator[Claim]:
    """`Headroom` has no simple measure of what is left, so its steps are unrolled: constant
    gradients, activations up to `gap` above them, any start, no history."""
    x, gap, start = symbol("x"), symbol("gap"), symbol("start")
    low, high = exponent(rule.min_scale), exponent(rule.max_scale)
    # log2 of the gradients in whole bits, so that `safe` is a whole exponent.
    safe = rule._top // _BIT - x - gap
    state = wrapped(rule.init())._replace(scale=Power(start))
    world = [start >= low, start <= high, gap >= 0, gap <= 8, safe >= low + 2, safe <= high - 2]
    world += [x >= -60, x <= 60]
    reached = []
    for i in range(STEPS):
        amax = Magnitude(state.scale.z * 256 + x * 256)
        s = stepped(rule, state, f" {i}", amax)
        world += [s.checked, z3.Not(s.loss_nonfinite), s.nonfinite == (state.scale.z > safe)]
        state = s.after
        reached.append(z3.And(state.scale.z <= safe, state.scale.z >= safe - 4))
    yield Claim(
        name,
        f"within {STEPS} steps it is at most 4 bits below the largest safe one",
        z3.Or(*reached),
        world,
    )


def claims() -> Iterator[Claim]:
    every = rules()
    backoffs = [r for r in every.values() if isinstance(r, Backoff)]
    for what, holds, given in floats.claims(backoffs):
        yield Claim("float32", what, holds, given)
    for name, rule in every.items():
        yield from claims_of(name, rule)
    yield from unrolled("auto", preset("auto"))


def refuted(claim: Claim) -> Any:
    """A counterexample, or None if there is none."""
    solver = z3.Solver()
    solver.set("timeout", 60_000)
    solver.add(*claim.given)
    if solver.check() != z3.sat:
        return "nothing satisfies what is given, so anything would follow"
    solver.add(z3.Not(claim.holds))
    found = solver.check()
    if found == z3.unsat:
        return None
    return solver.model() if found == z3.sat else f"z3 gave up: {solver.reason_unknown()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", action="store_true", help="also try faulty rules")
    args = parser.parse_args()
    began, count = time.perf_counter(), 0
    for claim in claims():
        count += 1
        model = refuted(claim)
        if model is not None:
            print(f"NOT PROVED  {claim.rule}: {claim.what}\n{model}")
            return 1
    took = time.perf_counter() - began
    print(f"{count} claims about {len(rules())} rules proved in {took:.0f} s")
    print(f"left out, since their numbers are no powers of two: {', '.join(left_out())}")
    if args.mutants:
        return try_mutants()
    return 0


def try_mutants() -> int:
    survived = []
    for mutant in MUTANTS:
        with mutant.applied():
            found = next((c for c in claims() if refuted(c) is not None), None)
        print(
            f"{'found   ' if found else 'SURVIVED'}  {mutant.what}"
            + (f"  ({found.rule}: {found.what})" if found else "")
        )
        if found is None:
            survived.append(mutant)
    print(f"{len(MUTANTS) - len(survived)} of {len(MUTANTS)} faults found")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
