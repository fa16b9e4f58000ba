"""Findings about the order of calls: clip, unscale_, step, update, zero_grad, backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby

from ...journal import Call, Calls, Run
from ..words import count, power
from .finding import SHOWN, Finding

MOST = 0.5  # of the windows: what happens less often may be an exception that was meant
MICRO_BATCHES = 2
LOST = 0.05  # share of gradient elements that float16 loses: more than noise
CHANGED = 2  # sampled windows: one may be an exception that was meant
VARIES = 1.01  # a factor that is the same in all steps is no clipping
STEPS = ("scaler.step", "optimizer.step")
ZERO = ("zero_grad", "model.zero_grad")


def orders(run: Run) -> list[Calls]:
    """Each order of calls once, with the number of windows that had it."""
    found: dict[tuple[Call, ...], Calls] = {}
    for calls in run.calls:
        before = found.get(calls.order)
        first = calls.step if before is None else min(before.step, calls.step)
        most = calls.times if before is None else max(before.times, calls.times)
        found[calls.order] = Calls(first, calls.order, most)
    return list(found.values())


Where = tuple[Call, Calls]


def _where(run: Run, wrong: Callable[[tuple[Call, ...]], Iterator[Call]]) -> list[Where]:
    """Calls that are wrong, with the windows in which they are."""
    return [(call, calls) for calls in orders(run) for call in wrong(calls.order)]


def _windows(found: list[Where]) -> int:
    return sum({id(calls): calls.times for _, calls in found}.values())


def _total(run: Run) -> int:
    return sum(calls.times for calls in orders(run))


def _of(call: Call, who: str) -> bool:
    """Does a call concern this optimizer? One without a name concerns all."""
    return not call.who or not who or call.who == who


def _carries_scale(order: tuple[Call, ...], at: int) -> bool:
    """Do the gradients of the optimizer of call `at` carry the scale when it is made?"""
    who, scaled = order[at].who, False
    for call in order[:at]:
        if call.name == "backward" and "scaled" in call.fact:
            scaled = True
        elif call.name in ("unscale_", "get_scale", *ZERO) and _of(call, who):
            scaled = False
    return scaled


def clip_scaled(run: Run) -> Finding | None:
    """Gradients are clipped while they still carry the scale."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        for i, call in enumerate(order):
            stepped = any(c.name == "scaler.step" and _of(c, call.who) for c in order[i:])
            if call.name.startswith("clip_grad_") and stepped and _carries_scale(order, i):
                yield call

    found = _where(run, wrong)
    if not found:
        return None
    call, calls = found[0]
    limit = f" at {call.fact}" if call.fact else ""
    scale = next((s.scale for s in run.steps if s.step >= calls.step), float("nan"))
    true = f": the true gradients were clipped at {float(call.fact) / scale:.3g}" if limit else ""
    return Finding(
        "broken",
        "Gradients are clipped while they carry the scale",
        f"{call.name} clipped{limit} after backward() and before unscale_(), in "
        f"{count(_windows(found), 'step')} of {len(run.steps)}: a scale of {scale:g} was still in "
        f"the gradients{true}.",
        (calls.step,),
        (),
        f"Call scaler.unscale_(optimizer) before {call.name}.",
        "clip-scaled",
        call.place,
        "certain",
    )


def _changes(run: Run) -> list[Where]:
    """Sampled windows in which gradients that carry the scale were changed by hand."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        for i, call in enumerate(order):
            if call.name == "gradients changed" and _carries_scale(order, i):
                yield call

    one_rank = run.header.get("world_size") in (None, 1)  # ranks may average them by hand
    return _where(run, wrong) if one_rank else []


def _factors(found: list[Where]) -> list[float]:
    """By which gradients were multiplied; empty if something else was done to them."""
    facts = [call.fact.partition("times ") for call, _ in found]
    known = all(times and _is_positive(factor) for _, times, factor in facts)
    return [float(factor) for _, _, factor in facts] if known else []


def clipped_by_hand(run: Run) -> Finding | None:
    """Gradients that carry the scale are multiplied by a factor that differs from step to step."""
    found = _changes(run)
    factors = _factors(found)
    if len(factors) < CHANGED or max(factors) >= 1 or max(factors) < VARIES * min(factors):
        return None
    call, _calls = found[0]
    return Finding(
        "broken",
        "Gradients are clipped by hand while they carry the scale",
        f"Between backward() and this call, in {len(factors)} sampled steps, all elements of a "
        f"gradient were multiplied by the same number, {min(factors):g} to {max(factors):g}: a "
        "limit on their norm, which was compared with gradients that are larger by the scale.",
        tuple(calls.step for _, calls in found[:SHOWN]),
        (),
        "Call scaler.unscale_(optimizer) before the gradients are clipped.",
        "clip-scaled",
        call.place,
        "likely",
    )


def unscale_missing(run: Run) -> Finding | None:
    """Something is added to gradients that carry the scale."""
    found = [(call, calls) for call, calls in _changes(run) if call.fact == "added"]
    if _windows(found) < CHANGED:
        return None
    call, _ = found[0]
    return Finding(
        "warning",
        "Gradients are changed by hand while they carry the scale",
        f"Between backward() and this call, in {count(_windows(found), 'sampled step')}, "
        "something was added to a gradient before the scale was taken out: noise or decay then "
        "counts for less by the scale. If it is in proportion to the gradient, all is well.",
        tuple(calls.step for _, calls in found[:SHOWN]),
        (),
        "Call scaler.unscale_(optimizer) before the gradients are changed.",
        "unscale-missing",
        call.place,
        "possible",
    )


def step_beside_scaler(run: Run) -> Finding | None:
    """An optimizer stepped with gradients that carry the scale."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        for i, call in enumerate(order):
            if (
                call.name == "optimizer.step"
                and _carries_scale(order, i)
                and "again" not in (call.fact)
            ):
                yield call

    found = _where(run, wrong)
    if not found:
        return None
    call, calls = found[0]
    return Finding(
        "broken",
        "An optimizer is stepped beside the scaler",
        f"{call.who or 'An optimizer'} was stepped directly in {count(_windows(found), 'window')}, "
        "with gradients of a scaled loss: the updates are wrong by the scale, and an overflow is "
        "not skipped.",
        (calls.step,),
        (),
        "Write scaler.step(optimizer) instead of optimizer.step().",
        "step-beside-scaler",
        call.place,
        "certain",
    )


def step_twice(run: Run) -> Finding | None:
    """An optimizer stepped twice on the same gradients."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        return (c for c in order if c.name in STEPS and "again" in c.fact)

    found = _where(run, wrong)
    if not found or _windows(found) < 2:
        return None
    call, calls = found[0]
    return Finding(
        "broken",
        "An optimizer steps twice on the same gradients",
        f"{call.who or 'An optimizer'} was stepped again without a backward pass in between, in "
        f"{count(_windows(found), 'window')}.",
        (calls.step,),
        (),
        "Remove one of the two calls.",
        "step-twice",
        call.place,
        "certain",
    )


def zero_grad_missing(run: Run) -> Finding | None:
    """Gradients of earlier steps are added to those of the next."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        return (c for c in order if c.name in STEPS and "kept" in c.fact)

    found = _where(run, wrong)
    if not found or _windows(found) < max(2, MOST * (_total(run) - 1)):
        return None
    step, calls = found[0]
    call = next((c for c in calls.order if c.name == "backward"), step)
    cleared = any(c.name in ZERO for calls in orders(run) for c in calls.order)
    how = "zero_grad() was called, but not for them" if cleared else "zero_grad() was never called"
    return Finding(
        "broken",
        "Gradients are not cleared between steps",
        f"In {count(_windows(found), 'step')} of {len(run.steps)} the gradients of the step before "
        f"were still there when backward() added new ones; {how}.",
        (calls.step,),
        (),
        "Call optimizer.zero_grad() before this backward().",
        "zero-grad-missing",
        call.place,
        "certain",
    )


def zero_grad_misplaced(run: Run) -> Finding | None:
    """Gradients are cleared after backward and before the step."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        for i, call in enumerate(order):
            if call.name not in ZERO:
                continue
            before = any(c.name == "backward" for c in order[:i])
            for after in order[i:]:
                if after.name == "backward":
                    break
                if after.name in STEPS and _of(call, after.who) and before:
                    yield call
                    break

    found = _where(run, wrong)
    if not found or _windows(found) < MOST * _total(run):
        return None
    call, calls = found[0]
    return Finding(
        "broken",
        "Gradients are cleared before the step uses them",
        f"{call.name}() was called after backward() and before the step, in "
        f"{count(_windows(found), 'window')} of {_total(run)}: the step had no gradients.",
        (calls.step,),
        (),
        "Move this zero_grad() before backward(), or behind the step.",
        "zero-grad-misplaced",
        call.place,
        "certain",
    )


def update_missing(run: Run) -> Finding | None:
    """A scaler stepped an optimizer several times without update()."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        seen: set[str] = set()
        for call in order:
            if call.name == "update":
                seen.clear()
            elif call.name == "scaler.step":
                if call.who in seen or call.times > 1:
                    yield call
                    return
                seen.add(call.who)

    found = _where(run, wrong)
    if not found:
        return None
    call, calls = found[0]
    return Finding(
        "broken",
        "update() is missing",
        f"scaler.step() was called again without update() in {count(_windows(found), 'window')}: "
        "torch refuses that, and the step is not made.",
        (calls.step,),
        (),
        "Call scaler.update() after scaler.step(), in every iteration.",
        "update-missing",
        call.place,
        "certain",
    )


def update_twice(run: Run) -> Finding | None:
    """update() was called between the steps of two optimizers on one loss, or twice in a row."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        names = {c.name for c in order}
        if "scale" not in names and "backward" not in names:
            yield from [c for c in order if c.name == "update" and c.fact != "new_scale"][:1]

    found = _where(run, wrong)
    if not found:
        return None
    call, calls = found[0]
    return Finding(
        "broken",
        "update() is called twice for one backward pass",
        f"In {count(_windows(found), 'window')} update() came without a scaled loss since the "
        "update() before. A step in between divides by a scale that the gradients do not have.",
        (calls.step,),
        (),
        "Call scaler.update() once, after the steps of all optimizers.",
        "update-twice",
        call.place,
        "certain",
    )


def gan_two_updates(run: Run) -> Finding | None:
    """One scaler is updated after each of several optimizers."""
    steppers: dict[str, dict[tuple[str, ...], Where]] = {}
    for calls in orders(run):
        names = [c.name for c in calls.order]
        update = next((c for c in calls.order if c.name == "update"), None)
        who = tuple(sorted({c.who for c in calls.order if c.name == "scaler.step"}))
        if update is None or not who or "scale" not in names or 2 * calls.times < 3:
            continue
        steppers.setdefault(update.who, {}).setdefault(who, (update, calls))
    for groups in steppers.values():
        alone = [w for who, w in groups.items() if len(who) == 1]
        if len(alone) < 2:
            continue
        call, calls = alone[0]
        optimizers = ", ".join(who[0] for who in groups if len(who) == 1)
        return Finding(
            "warning",
            "One scaler is updated several times in an iteration",
            f"update() follows each step of {optimizers}: the scale counts "
            f"{len(alone)} clean steps an iteration, so it grows {len(alone)} times as often as "
            "growth_interval says, and an overflow of one optimizer lowers the scale of all.",
            (calls.step,),
            (),
            "Call update() once, after the steps of all optimizers, or give each a scaler of its "
            "own.",
            "gan-two-updates",
            call.place,
            "likely",
        )
    return None


def accumulation_not_divided(run: Run) -> Finding | None:
    """Losses of micro-batches are added up, and no division is seen."""
    total = _total(run)
    for calls in orders(run):
        if calls.times < max(2, MOST * (total - 1)):
            continue
        for call in calls.order:
            if call.name != "backward" or call.times < MICRO_BATCHES or "divided" in call.fact:
                continue
            if any(c.name in ZERO and c.times >= call.times for c in calls.order):
                continue  # cleared before each, as a closure does
            return Finding(
                "warning",
                f"The losses of {call.times} micro-batches are added up",
                f"{call.times} backward passes from one line come before each step, in "
                f"{calls.times} of {total} windows, and no division of the loss is seen: the "
                f"gradient is {call.times} times that of the mean. If the sum is meant, all is "
                "well.",
                (calls.step,),
                (),
                f"If the loss is meant to be a mean, divide it: (loss / {call.times}).backward().",
                "accumulation-not-divided",
                call.place,
                "possible",
            )
    return None


def loss_not_scaled(run: Run) -> Finding | None:
    """A scaler stepped with gradients of a loss that was not scaled."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        names = {c.name for c in order}
        if "scaler.step" not in names or "optimizer.step" in names:
            return
        last: list[Call] = []
        for call in order:
            if call.name == "backward" and not {"scaled", "unknown"} & set(call.fact.split()):
                last.append(call)
            elif call.name in ZERO:
                last = []
            elif call.name == "scaler.step" and last:
                yield last[0]
                return

    found = _where(run, wrong)
    if not found:
        return None
    call, calls = found[0]
    return Finding(
        "broken",
        "A loss is not scaled",
        f"backward() was called on a loss that had not been through scaler.scale(), in "
        f"{count(_windows(found), 'window')} of {_total(run)}, and scaler.step() divided its "
        "gradients by the scale: they count for next to nothing.",
        (calls.step,),
        (),
        "Write scaler.scale(loss).backward().",
        "loss-not-scaled",
        call.place,
        "certain",
    )


def penalty_scaled(run: Run) -> Finding | None:
    """A gradient penalty is made of gradients that carry the scale."""

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        for i, call in enumerate(order):
            scaled = {"scaled", "create_graph"} <= set(call.fact.split())
            divided = any(c.name == "get_scale" for c in order[: i + 3])
            if call.name == "autograd.grad" and scaled and not divided:
                yield call

    found = _where(run, wrong)
    if not found:
        return None
    call, calls = found[0]
    return Finding(
        "broken",
        "A gradient penalty is computed from scaled gradients",
        f"autograd.grad(..., create_graph=True) was called on a scaled loss in "
        f"{count(_windows(found), 'window')}, and the scale was not taken out (get_scale() was not "
        "called): the penalty is wrong by the scale, and changes with it.",
        (calls.step,),
        (),
        "Divide the gradients by scaler.get_scale() before the penalty is computed, or call "
        "autograd.grad on the loss that is not scaled.",
        "penalty-scaled",
        call.place,
        "likely",
    )


def autocast_no_scaler(run: Run) -> Finding | None:
    """float16 autocast, and an optimizer without a scaler."""
    if run.header.get("rule") != "off":
        return None

    def wrong(order: tuple[Call, ...]) -> Iterator[Call]:
        if any(c.name == "optimizer.step" for c in order):
            yield from [c for c in order if c.name == "autocast" and c.fact == "float16"][:1]

    found = _where(run, wrong)
    if not found:
        return None
    call, calls = found[0]
    zeros = [
        facts.get("zero", 0.0) + facts.get("subnormal", 0.0)
        for sample in run.samples
        for facts in sample.parameters.values()
    ]
    lost = sum(zeros) / len(zeros) if zeros else 0.0
    return Finding(
        "warning" if lost >= LOST else "hint",
        "float16 is used without a scaler",
        f"In {count(_windows(found), 'window')} of {_total(run)} the forward pass ran under "
        f"float16 autocast, and no loss was scaled: {lost:.0%} of the sampled gradient elements "
        "are zero or subnormal.",
        (calls.step,),
        (),
        "Scale the loss: scaler = GradScaler(); scaler.scale(loss).backward(); "
        "scaler.step(optimizer); scaler.update(). Or use bfloat16.",
        "autocast-no-scaler",
        call.place,
        "certain",
    )


def _new_scalers(run: Run) -> Finding | None:
    """Scalers that follow each other, on the same parameters."""
    trained = {"": run.header.get("parameters")}
    for event in run.events:
        if event.what == "note" and event.detail.get("code") == "scale":
            trained[str(event.detail.get("key", ""))] = event.detail.get("parameters")
    order = list(dict.fromkeys(step.key for step in run.steps))
    if len(order) < 2 or any(trained.get(key) != trained[""] for key in order):
        return None
    turns = [key for key, _ in groupby(step.key for step in run.steps)]
    starts = [steps[0].scale for steps in run.by_key.values()]
    if not trained[""] or turns != order or len(set(starts)) > 1:
        return None
    lost = sum(step.skipped for step in run.steps)
    first = next(step for step in run.steps if step.key == order[1])
    update = next((c for calls in orders(run) for c in calls.order if c.name == "update"), None)
    return Finding(
        "warning",
        "A new scaler is made again and again",
        f"{len(order)} scalers stepped the same parameters, one after the other, and each began "
        f"at a scale of {power(first.scale)}: what the one before had learned was dropped. "
        f"{lost} of {count(len(run.steps), 'step')} were skipped.",
        (first.step,),
        (),
        "Make the scaler once, where the optimizer is made, and hand it on.",
        "resume-without-scaler",
        update.place if update is not None else "",
        "certain",
    )


def resume_without_scaler(run: Run) -> Finding | None:
    """Model and optimizer were loaded, and the scaler was not."""
    if not any(c.name == "update" for calls in orders(run) for c in calls.order):
        return None
    if again := _new_scalers(run):
        return again
    loaded = _where(run, lambda o: (c for c in o if c.name == "optimizer.load_state_dict"))
    names = {c.name for calls in orders(run) for c in calls.order}
    if not loaded or "scaler.load_state_dict" in names:
        return None
    call, calls = loaded[0]
    return Finding(
        "warning",
        "The scaler's state was not restored",
        f"The optimizer's state was loaded at step {calls.step}, the scaler's was not: its scale "
        f"starts anew ({next((f'{s.scale:g}' for s in run.steps if s.step >= calls.step), '-')}), "
        "and steps are lost until it fits again.",
        (calls.step,),
        (),
        "Save scaler.state_dict() with the checkpoint, and call scaler.load_state_dict() beside "
        "this line.",
        "resume-without-scaler",
        call.place,
        "likely",
    )


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
