"""The reference: what an adapter must come to, whatever it was asked to do.

Scales are powers of two and the update is a subtraction, so NumPy's float32 gives every bit. Of
gradlift only the rules are used, which are proved (`make prove`), and the names of causes.
"""

import copy
import math
from typing import NamedTuple

import numpy as np

from gradlift import Cause, Reading, Verdict
from gradlift.journal import Step
from gradlift.rules import parse, resolve

nan = math.nan
LARGEST = float(np.finfo(np.float32).max)


class Sgd:
    """weights -= gradients: plain SGD at a learning rate of 1."""

    def __init__(self, sizes):
        self.weights = {n: np.ones(k, np.float32) for n, k in sizes.items()}

    def apply(self, grads):
        for name, g in grads.items():
            self.weights[name] = self.weights[name] - g

    def adopt(self, weights):
        """After a step whose last bits are the framework's own."""
        self.weights = {n: np.array(w, np.float32) for n, w in weights.items()}

    def join(self, name, size):
        """A parameter group is added."""
        self.weights[name] = np.ones(size, np.float32)

    def saved(self):
        return copy.deepcopy(self.weights)

    def load(self, saved):
        self.weights = copy.deepcopy(saved)


class Outcome(NamedTuple):
    """What a step comes to."""

    verdict: Verdict
    cause: Cause
    culprits: frozenset[str]
    exact: bool
    """False: the gradients were clipped, and the norm's last bit is in the weights."""


class Model:
    """A scale, weights, and what happened since the last update.

    `facts` is the driver: what its adapter cannot know (CANNOT), in which precision it adds up
    gradients (`sums`), whether it averages micro-batches (`averages`), whether weights have 16 bits
    (`half_weights`).
    """

    def __init__(self, rule, limits, facts, mover, *, to_none=True):
        self.facts, self.limits, self.to_none = facts, limits, to_none
        self.rule, self.sharp = resolve(rule, retries=False), parse(rule)
        self.state = self.rule.init()
        self.mover = mover
        self.steps = self.skipped = 0
        self.lines = []
        """What the journal must say."""
        self.frozen = set()
        self.already = {}
        """What gradients hold before the next micro-batch: zeros of `zero_grad(set_to_none=False)`,
        sums of `accumulate`."""
        self.stale = False
        """Was a state loaded in mid-window, and no loss scaled since?"""
        self.begin()

    @property
    def weights(self):
        return self.mover.weights

    def begin(self):
        """A new window."""
        self.batches, self.losses, self.dropped = [], [], []
        self.overflow_dropped, self.none_kept_of, self.dead = False, 0, set()
        self.held, self.reading, self.outcome = {}, None, None
        self.unscaled, self.dirty, self.culprits = False, set(), set()
        self.shown, self.showed = {}, {}
        self.coefficient = 1.0

    # What the user does

    def batch(self, loss, grads):
        self.stale = False
        self.losses.append(loss)
        self.batches.append({n: g for n, g in grads.items() if n not in self.frozen})

    def zero_grad(self):
        """Gradients are gone; that a loss was not finite is still known."""
        names = {n for g in self.batches for n in g} | {*self.held, *self.already}
        names -= {n for n in names if self.to_none}
        self.already = {n: np.zeros_like(self.weights[n]) for n in names}
        self.batches, self.held = [], {}

    def look(self):
        """The gradients are read; again, if they were changed since."""
        if self.reading is None:
            self.held = self.added(self.batches)
            self.measure()
        elif self.dirty:
            self.take_changes()
            if self.unscaled:
                bad = {n for n in self.dirty if not np.isfinite(self.held[n]).all()}
                self.culprits = self.culprits or bad
                self.reading = self.reading._replace(nonfinite=self.reading.nonfinite or bool(bad))
            else:
                self.measure()
        self.dirty = set()

    def take_changes(self):
        """Where 16-bit gradients are held in float32, a change counts if `.grad` shows another
        value; then all that it shows is taken over."""
        for name in self.dirty & {*self.shown}:
            if not np.array_equal(self.shown[name], self.showed[name], equal_nan=True):
                self.held[name] = self.shown[name].astype(np.float32)
                self.showed[name] = self.shown[name].copy()

    def added(self, batches):
        """Each micro-batch in float16 at the scale, and their sum."""
        sums = self.facts.sums
        total = {n: z.astype(sums) for n, z in self.already.items()}
        share = len(batches) if self.facts.averages else 1
        for grads in batches:
            for name, g in grads.items():
                with np.errstate(all="ignore"):
                    half = self.carried(g * np.float32(share))
                    total[name] = total[name] + half if name in total else half
        return {n: g / np.float32(share) for n, g in total.items()}

    def carried(self, g):
        """A gradient as a backward pass in float16 leaves it."""
        return np.float16(g * np.float32(self.state.scale)).astype(self.facts.sums)

    def measure(self):
        flat = [np.ravel(g).astype(np.float64) for g in self.held.values()]
        flat = np.concatenate([np.zeros(0), *flat])
        factor = 1.0 if self.unscaled else 1 / self.state.scale
        with np.errstate(all="ignore"):
            wrong = ~(np.abs(flat) * max(1.0, factor) <= LARGEST)
        bad, amax = bool(wrong.any()), float(np.abs(flat[~wrong]).max(initial=0.0))
        none_kept = self.none_kept_of == len(self.losses)
        lost = self.dropped and (not self.held or none_kept)
        if lost:
            bad, amax = True, math.inf
        flags = [
            not math.isfinite(x) or i in self.dead
            for i, x in enumerate(self.losses)
            if i not in self.dropped
        ]
        level = any(flags) + all(flags) if flags else 0
        blamed = "loss" not in self.facts.CANNOT and level + bad >= 2
        blamed = blamed or bool(lost and not self.overflow_dropped)
        self.reading = Reading(bad, amax, blamed, checked=bool(self.held or lost))
        if bad:
            self.culprits = {n for n, g in self.held.items() if not np.isfinite(g).all()}
        self.norm = math.sqrt(float((flat[~wrong] ** 2).sum())) * factor

    def unscale(self):
        self.look()
        if not self.unscaled:
            self.unscaled = True
            self.held = self.true(self.held)
            if self.facts.sums is np.float16:
                with np.errstate(all="ignore"):
                    self.shown = {n: g.astype(np.float16) for n, g in self.held.items()}
                self.showed = copy.deepcopy(self.shown)

    def true(self, grads):
        with np.errstate(all="ignore"):
            return {
                n: g.astype(np.float32) * np.float32(1 / self.state.scale) for n, g in grads.items()
            }

    def clip(self, max_norm):
        self.look()
        reading = self.reading
        self.measure()  # an edit has changed the norm
        if self.unscaled:
            self.reading = reading
        if not self.reading.nonfinite:
            self.coefficient = min(1.0, max_norm / (self.norm + 1e-6))

    def edit(self, name, index, value):
        """`.grad[index] = value`"""
        self.dirty.add(name)
        where = self.shown if name in self.shown else self.held
        where[name] = where[name].copy()
        where[name][index] = value

    def clip_by_hand(self):
        """At a norm that is never reached: times 1, but times NaN or 0 if some are not finite."""
        flat = np.concatenate([np.ravel(g) for g in self.held.values()])
        factor = nan if np.isnan(flat).any() else 0 if np.isinf(flat).any() else 1
        self.dirty |= {*self.held}
        with np.errstate(all="ignore"):
            self.held = {n: g * np.float32(factor) for n, g in self.held.items()}

    def step(self):
        """Decides; moves the weights if the step is sound."""
        self.look()
        cause = self.cause()
        verdict, exact = self.verdict(cause), self.coefficient == 1.0
        if verdict is Verdict.APPLY:
            true = self.held if self.unscaled else self.true(self.held)
            if not exact:
                true = {n: g * np.float32(self.coefficient) for n, g in true.items()}
            if cause is not Cause.NO_GRADIENTS:
                self.mover.apply(true)
            if self.facts.half_weights and self.beyond():
                cause = Cause.WEIGHT_RANGE
        self.outcome = Outcome(verdict, cause, frozenset(self.culprits), exact)
        return self.outcome

    def beyond(self):
        """Has a weight left the range of its 16 bits?"""
        with np.errstate(over="ignore"):
            return any(np.isinf(np.float16(w)).any() for w in self.weights.values())

    def cause(self):
        r = self.reading
        if not r.checked:
            return Cause.NO_GRADIENTS
        if r.loss_nonfinite:
            return Cause.LOSS_NONFINITE
        if not r.nonfinite:
            return Cause.NONE
        rule, state = self.rule, self.state
        moves = rule.min_scale < rule.max_scale
        if moves and state.scale <= rule.min_scale and state.left <= 1:
            return Cause.FLOOR
        known = self.losses and "loss" not in self.facts.CANNOT
        return Cause.OVERFLOW if known else Cause.UNKNOWN_NONFINITE

    def verdict(self, cause):
        if cause is Cause.NONE:
            return Verdict.APPLY
        if cause is Cause.NO_GRADIENTS:
            return Verdict.SKIP
        most = self.limits.get("max_consecutive_skips")
        if most is not None and self.state.skips >= most:
            return Verdict.HALT
        if cause is Cause.FLOOR and self.limits.get("on_floor") == "raise":
            return Verdict.HALT
        return Verdict.SKIP

    def update(self, retries=0):
        """The scale moves; a window that was neither looked at nor stepped goes on."""
        if self.reading is None:
            return
        before, reading = self.state, self.reading
        dropped = reading.checked and self.overflow_dropped
        seen = reading._replace(nonfinite=True) if dropped else reading
        self.state = self.rule.advance(before, seen)
        if dropped and not (reading.nonfinite or reading.loss_nonfinite):
            self.state = self.state._replace(skips=0)  # the others are sound: no skip
        self.skipped += bool(reading.checked and self.state.skips > 0)
        if self.outcome is not None:
            self.lines.append(
                Step(
                    self.steps,
                    before.scale,
                    self.state.scale,
                    nonfinite=reading.nonfinite,
                    loss=sum(self.losses) if self.losses else math.nan,
                    verdict=self.outcome.verdict,
                    cause=self.outcome.cause,
                    retries=retries,
                )
            )
        self.steps += 1
        self.zero_grad()
        self.begin()

    # Whole steps

    def train(self, loss, grads, retries):
        """The same batch, at other scales while that helps; returns how often."""
        if retries:
            self.sharpen()
        clean_at, tried = 0.0, 0
        for left in range(retries, -1, -1):
            self.begin()
            self.already = {}
            self.batch(loss, grads)
            self.look()
            reading, before = self.reading, self.state
            after = self.rule.advance(before, reading)
            lower = reading.nonfinite and after.scale < before.scale and left > 0
            larger = not reading.nonfinite and self.rule.recompute(before, after) and left > 1
            if reading.loss_nonfinite or not reading.checked or not (lower or larger):
                break
            if larger:
                clean_at = before.scale
            scale = clean_at if lower and clean_at and left == 1 else after.scale
            self.state = after._replace(scale=scale, skips=before.skips)
            tried += 1
        self.step()
        if self.outcome.verdict is Verdict.SKIP:
            self.batches, self.held = [], {}
        return tried

    def sharpen(self):
        """ "auto" where batches are retried; nothing for another rule."""
        if self.rule != self.sharp:
            if not self.rule.calibrated(self.state):
                kept = {"scale": self.state.scale, "skips": self.state.skips}
                self.state = self.sharp.init()._replace(**kept)
            self.rule = self.sharp

    def accumulate(self, batches):
        """Micro-batches of which the bad ones are left out. A loss without gradients belongs to the
        next one; none of a micro-batch's losses is finite if one is not."""
        kept, losses = [], []
        for i, (loss, grads) in enumerate(batches):
            self.batch(loss, grads)
            losses.append(i)
            found = self.batches[i]
            if not found:
                continue
            with np.errstate(all="ignore"):
                bad = any(not np.isfinite(self.carried(g)).all() for g in found.values())
            if bad:
                self.dropped += losses
                self.overflow_dropped |= all(math.isfinite(batches[j][0]) for j in losses)
            else:
                kept.append(found)
            if not all(math.isfinite(batches[j][0]) for j in losses):
                self.dead.update(losses)
            losses = []
        self.none_kept_of = 0 if kept else len(self.losses)
        self.already, self.batches = self.added(kept), []

    # States

    def saved(self):
        held = {name: getattr(self, name) for name in ("state", "steps", "skipped")}
        return {**held, "sharp": self.rule == self.sharp, "mover": self.mover.saved()}

    def load(self, saved):
        if saved["sharp"]:
            self.sharpen()
        self.state, self.steps, self.skipped = (saved[n] for n in ("state", "steps", "skipped"))
        self.mover.load(saved["mover"])
        self.stale = bool(self.losses) or self.reading is not None
        self.begin()
        self.already = {}
