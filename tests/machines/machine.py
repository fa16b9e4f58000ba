"""The actions of a user as rules of a Hypothesis machine, and the promises as its invariants.

    machine = machine_for(Driver)

A `Driver` is what the conformance suites have, and says in data what its adapter has:

    CAN         names of `ACTIONS`: a machine has those rules and no others
    RULES       texts of rules          LIMITS      settings of when to halt
    WINDOWS     how many micro-batches a step may have
    mixes       may one of them have no gradients?
    CLIPS       norms at which gradients are clipped
    sums, averages, half_weights, CANNOT    see `Model`

and does the actions under their names. After each, a `Model` that did the same must agree.
"""

import functools
import json
import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gradlift import Cause, Verdict, read_journal
from gradlift.errors import MisuseError, SettingsError, StateError, TrainingHalted

from .model import Model, Sgd

SIZES = {"a": 4, "b": 2, "c": 3}
START = {"a": 4, "b": 2}

GRADS = {
    "unit": {"a": [0.5, -0.25, 0.125, 0], "b": [0.25, 0.5], "c": [-1, 0.5, 0]},
    "ones": {"a": [1, 1, 1, 1], "b": [-1, -1], "c": [1, 1, 1]},
    "zero": {"a": [0, 0, 0, 0], "b": [0, 0], "c": [0, 0, 0]},
    "odd": {"a": [0.75, 1.25, -3.5, 7], "b": [2.5, -0.625], "c": [5, 0, 1.5]},
}
inf, nan = math.inf, math.nan

PLACES = st.sampled_from([(n, i) for n, k in SIZES.items() for i in range(k)])
SPOILS = st.sampled_from([inf, -inf, nan, 1e6, 49152.0])
LOSSES = st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.5, 0.5, nan, inf, -inf])
BATCH = {
    "grads": st.sampled_from(["odd", "ones", "unit", "odd", "unit", "zero", None]),
    "times": st.sampled_from([1.0, 1.0, 2.0**-4, 2.0**-12, 2.0**-20, 2.0**6, 2.0**14]),
    "spoil": st.one_of(st.none(), st.none(), st.none(), st.tuples(PLACES, SPOILS)),
    "loss": LOSSES,
}

BACKOFF = [
    "backoff:init_scale=16,growth_interval=2,min_scale=1,max_scale=2^20",
    "backoff:init_scale=2^10,growth_interval=1,min_scale=2^8,max_scale=2^24",
    "static:16",
    "static:1",
    "megatron:growth_interval=2",
]
EVERY_RULE = [*BACKOFF, "auto", "auto:cautious", "auto:sharp", "mxnet:growth_interval=2"]
EVERY_RULE += ["metaseq:growth_interval=2", "fairseq:growth_interval=3,tolerance=0.2"]
LIMITS = [{}, {}, {"max_consecutive_skips": 2}, {"on_floor": "raise"}]

DAMAGES = {
    "None": lambda data: None,
    "empty": lambda data: {},
    "scale nan": lambda data: {**data, "scale": nan},
    "scale inf": lambda data: {**data, "scale": inf},
    "scale 0": lambda data: {**data, "scale": 0.0},
    "no scale": lambda data: {k: v for k, v in data.items() if k != "scale"},
    "clean -1": lambda data: {**data, "_growth_tracker": -1},
    "a later schema": lambda data: {**data, "gradlift": {**data["gradlift"], "schema": 9}},
    "another rule": lambda data: {**data, "gradlift": {**data["gradlift"], "rule": "other"}},
    "steps -1": lambda data: {**data, "gradlift": {**data["gradlift"], "steps": -1}},
    "skipped a text": lambda data: {**data, "gradlift": {**data["gradlift"], "skipped": "3"}},
    "left 2^40": lambda data: {**data, "gradlift": {**data["gradlift"], "left": 2**40}},
}

CHECKPOINTS = [
    *["save"] * 8,
    *["load", "load into a fresh one", "kill, and load into a fresh one"] * 3,
    *sorted(DAMAGES),
]


class Whole:
    """For a driver whose adapter takes a window in one call: micro-batches wait for it."""

    batches = ()

    def batch(self, loss, grads):
        self.batches = [*self.batches, (loss, grads)]

    def step(self):
        batches, self.batches = self.batches, ()
        self.window(list(batches))

    def zero_grad(self):
        self.batches = ()


tally = Counter()
"""What was done, by (adapter, kind, name): for `fuzz`."""


def gradients(grads, times, spoil, names):
    """True gradients by name, one of them spoilt; None: none at all."""
    if grads is None:
        return {}
    made = {n: np.float32(GRADS[grads][n]) * np.float32(times) for n in names}
    if spoil is not None:
        (name, index), value = spoil
        if name in made:
            made[name][index] = value
    return made


def same(found, expected):
    return {*found} == {*expected} and all(
        np.asarray(found[n], np.float32).tobytes() == expected[n].tobytes() for n in expected
    )


def action(**given):
    """A rule after which every promise must hold. (Hypothesis would print an invariant's name after
    each line of a script.)"""

    def promised(do):
        @functools.wraps(do)
        def done(self, **arguments):
            self.count("action", do.__name__)
            self.sound = False  # until the promises hold again
            do(self, **arguments)
            self.promises()
            self.sound = True

        return rule(**given)(done)

    return promised


class Machine(RuleBasedStateMachine):
    """What every adapter has: batches, a step, and the promises."""

    Driver = driver = model = None
    sound = True

    def start(self, rule, limits, journal, to_none):
        """A new run."""
        self.folder = Path(tempfile.mkdtemp(prefix="machine-")) if journal else None
        self.path = self.folder / "run.jsonl" if journal else None
        self.rule, self.limits, self.saved = rule, limits, None
        self.kept_to_none = to_none
        self.names = list(START)
        self.driver = self.fresh()
        self.model = Model(rule, limits, self.Driver, self.mover(), to_none=to_none)
        self.before = None

    def fresh(self):
        driver = self.Driver(self.rule, self.path and str(self.path), **self.limits)
        driver.to_none = self.kept_to_none
        return driver

    def mover(self):
        return getattr(self.Driver, "mover", Sgd)(START)

    def count(self, kind, name=""):
        tally[self.Driver.__name__, kind, name] += 1

    # Actions

    def fits(self, grads):
        """May another micro-batch with these gradients join the window?"""
        m = self.model
        if m.reading is not None or len(m.batches) >= max(self.Driver.WINDOWS):
            return False
        return self.Driver.mixes or not m.batches or (all(m.batches) and grads is not None)

    @precondition(lambda self: self.fits("any"))
    @action(**BATCH)
    def batch(self, grads, times, spoil, loss):
        """scale and backward; `grads` is a name in `GRADS`."""
        self.one_batch(grads, times, spoil, loss)

    def one_batch(self, grads, times, spoil, loss):
        if self.fits(grads):
            made = gradients(grads, times, spoil, self.names)
            self.model.batch(loss, made)
            self.driver.batch(loss, made)

    @precondition(lambda self: is_fresh(self) and not self.model.stale)
    @action(batches=st.lists(st.fixed_dictionaries(BATCH), min_size=0, max_size=3))
    def window(self, batches):
        """Micro-batches, step, update."""
        if len(batches) in self.Driver.WINDOWS:
            for each in batches:
                self.one_batch(**each)
            self.judged(self.model.step, self.driver.step)
            if self.model.reading is not None:  # not ended by a halt
                self.one_update()

    def can_step(self):
        m = self.model
        if m.outcome is not None or m.stale:
            return False
        return bool(m.reading is not None or (m.losses and len(m.batches) in self.Driver.WINDOWS))

    @precondition(can_step)
    @action()
    def step(self):
        self.judged(self.model.step, self.driver.step)

    def judged(self, model, driver, *given):
        """Both make a step; what is not applied changes nothing."""
        before = self.driver.everything()
        tried = model(*given) if given else model()
        wanted, retries = self.model.outcome, tried if given else 0
        halted = False
        try:
            driver(*given)
        except TrainingHalted:
            halted = True
        assert halted == (wanted.verdict is Verdict.HALT), (halted, wanted)
        if wanted.verdict is not Verdict.APPLY:
            assert self.driver.everything() == before, "a step that was not applied changed this"
        if not wanted.exact:
            found = self.driver.weights()
            for name, w in self.model.weights.items():
                np.testing.assert_allclose(found[name], w, rtol=2e-6, atol=1e-6)
            self.model.mover.adopt(found)
        if given or halted or "update" not in self.Driver.CAN:
            self.ended(retries)

    def ended(self, retries=0):
        """The window is over: what the adapter says of it."""
        wanted = self.model.outcome
        self.count("window")
        if wanted is not None and wanted.cause is not Cause.NONE:
            self.count("cause", wanted.cause.name)
        self.tally_retries(retries)
        self.model.update(retries)
        self.driver.zero_grad()
        if wanted is None:
            return
        result = self.driver.result
        if result is None:
            return
        assert (result.verdict, result.cause) == (wanted.verdict, wanted.cause), result
        assert result.retries == retries
        if not {"culprits", "all culprits"} & {*self.Driver.CANNOT} and result.skipped:
            assert {*result.culprits} == wanted.culprits

    def tally_retries(self, retries):
        tally[self.Driver.__name__, "retries", ""] += retries

    # Promises

    def promises(self):
        self.weights_are_the_references()
        self.the_scale_is_the_rules_own()
        self.skips_are_counted()

    def weights_are_the_references(self):
        found = self.driver.weights()
        assert all(np.isfinite(w).all() for w in found.values()), found
        assert same(found, self.model.weights), (found, self.model.weights)

    def the_scale_is_the_rules_own(self):
        scale, rule = self.driver.get_scale(), self.model.rule
        assert scale == self.model.state.scale
        assert rule.min_scale <= scale <= rule.max_scale
        assert math.frexp(scale)[0] == 0.5

    def skips_are_counted(self):
        assert self.driver.skipped_steps == self.model.skipped

    def check_journal(self):
        """Its lines are what happened, in this order."""
        if self.path is None or not self.path.exists():
            assert not self.model.lines or self.path is None
            return
        if not self.model.lines:
            return
        cannot = self.Driver.CANNOT
        run = read_journal(self.path)
        fields = ["step", "scale", "next_scale", "nonfinite", "verdict", "cause", "retries"]
        fields += ["loss"] if "loss" not in cannot else []
        found = [[str(getattr(s, f)) for f in fields] for s in run.steps]
        wanted = [[str(getattr(s, f)) for f in fields] for s in self.model.lines]
        for i, (line, step) in enumerate(zip(found, wanted)):
            assert line == step, f"line {i}, expected: {dict(zip(fields, zip(line, step)))}"
        assert len(found) == len(wanted), f"{len(found)} lines of {len(wanted)} steps"
        assert run.skipped == sum(s.skipped for s in self.model.lines)

    def teardown(self):
        if self.model is None:
            return
        try:
            self.driver.close()
            if self.sound:  # else another error is on its way
                self.check_journal()
        finally:
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)


class Update(Machine):
    """`step` and `update` are two calls."""

    @action()
    def update(self):
        self.one_update()

    def one_update(self):
        looked = self.model.reading is not None
        self.driver.update()
        if looked:
            self.ended()


class GiveUp(Machine):
    """The gradients are thrown away before anybody has looked at them."""

    @precondition(lambda self: self.model.reading is None and self.model.losses)
    @action()
    def give_up(self):
        self.driver.zero_grad()
        self.model.zero_grad()


class Unscale(Machine):
    @precondition(lambda self: self.model.outcome is None and not self.model.stale)
    @action()
    def unscale_(self):
        self.model.unscale()
        self.driver.unscale_()


def can_clip(self):
    m = self.model
    return m.outcome is None and not m.stale and m.coefficient == 1.0


class Clip(Machine):
    @precondition(can_clip)
    @action(max_norm=st.sampled_from([2.0**30, 0.3]))
    def clip(self, max_norm):
        if max_norm not in self.Driver.CLIPS:
            return
        self.model.clip(max_norm)
        self.driver.clip(max_norm)


def can_edit(self):
    return self.model.reading is not None and self.model.outcome is None and self.model.held


EDITS = st.sampled_from([0.5, -0.25, 0.0, inf, nan])


class Edit(Machine):
    @precondition(can_edit)
    @action(place=PLACES, value=EDITS)
    def edit(self, place, value):
        name, index = place
        if name in self.model.held:
            self.model.edit(name, index, value)
            self.driver.edit(name, index, value)

    @precondition(lambda self: is_fresh(self) and not self.model.stale)
    @action(
        batches=st.lists(st.fixed_dictionaries(BATCH), min_size=1, max_size=2),
        drop_bad=st.booleans(),
        edits=st.lists(st.tuples(PLACES, EDITS), max_size=3),
    )
    def edited_window(self, batches, drop_bad, edits):
        """Micro-batches, unscale_, edits, step, update: seldom found one by one."""
        if drop_bad and "accumulate" in self.Driver.CAN:
            self.drop_bad(batches)
        else:
            for each in batches:
                self.one_batch(**each)
        self.model.unscale()
        self.driver.unscale_()
        for (name, index), value in edits:
            if name in self.model.held:
                self.model.edit(name, index, value)
                self.driver.edit(name, index, value)
        self.judged(self.model.step, self.driver.step)
        if self.model.reading is not None:
            self.one_update()


class ClipByHand(Machine):
    """`torch.nn.utils.clip_grad_norm_`, which writes to every gradient."""

    @precondition(lambda self: can_edit(self) and self.model.unscaled)
    @action()
    def clip_by_hand(self):
        self.driver.clip_by_hand(2.0**60)
        self.model.clip_by_hand()


def is_fresh(self):
    return self.model.reading is None and not self.model.losses


class Retry(Machine):
    @precondition(is_fresh)
    @action(retries=st.integers(0, 3), **BATCH)
    def train_step(self, retries, grads, times, spoil, loss):
        if retries not in getattr(self.Driver, "RETRIES", (0, 1, 2, 3)):
            return
        made = gradients(grads, times, spoil, self.names)
        self.judged(self.model.train, self.driver.train_step, loss, made, retries)


class Accumulate(Machine):
    @precondition(is_fresh)
    @action(batches=st.lists(st.fixed_dictionaries(BATCH), min_size=1, max_size=3))
    def accumulate_drop_bad(self, batches):
        self.drop_bad(batches)

    def drop_bad(self, batches):
        made = [
            (b["loss"], gradients(b["grads"], b["times"], b["spoil"], self.names)) for b in batches
        ]
        self.model.accumulate(made)
        self.driver.accumulate(made)


class Save(Machine):
    """Saved, loaded, killed; damage is refused."""

    @action(what=st.sampled_from(CHECKPOINTS))
    def checkpoint(self, what):
        """A kill throws all objects away; what a device had not sent yet is lost."""
        if what == "save":
            self.saved = (self.driver.save(), self.model.saved(), list(self.names))
        elif what in DAMAGES:
            self.load_damaged(what)
        elif self.saved:
            self.load(what)

    def load(self, what):
        driver, model, names = self.saved
        if what == "load":
            if names != self.names:  # a group was added since: the optimizer is another
                return
            self.driver.load(driver)
            self.model.load(model)
        elif what == "load into a fresh one":
            self.driver.close()
            self.resumed()
        else:
            if self.driver.kill():
                del self.model.lines[-1]
            self.resumed()
        self.count("load", what)

    def resumed(self):
        driver, model, names = self.saved
        lines = self.model.lines
        self.check_journal()
        self.driver = self.fresh()
        for name in names[len(START) :]:
            self.driver.add_group(name)
        self.driver.load(driver)
        self.model = Model(
            self.rule, self.limits, self.Driver, self.mover(), to_none=self.kept_to_none
        )
        self.model.load(model)
        self.model.lines = lines
        self.names = list(names)

    def load_damaged(self, damage):
        before, state = self.driver.everything(), self.driver.state_dict()
        bad = DAMAGES[damage](json.loads(json.dumps(state)))
        try:
            self.driver.load_state_dict(bad)
        except StateError:
            self.count("refused", f"state: {damage}")
        else:
            raise AssertionError(f"a damaged state was loaded: {damage}")
        assert self.driver.everything() == before
        assert self.driver.state_dict() == state


class Groups(Machine):
    """The optimizer's parameters change."""

    @precondition(lambda self: is_fresh(self) and "c" not in self.names)
    @action()
    def add_group(self):
        self.names.append("c")
        self.model.mover.join("c", SIZES["c"])
        self.driver.add_group("c")

    @precondition(lambda self: is_fresh(self) and "b" not in self.model.frozen)
    @action()
    def freeze(self):
        self.model.frozen.add("b")
        self.driver.freeze("b", True)

    @precondition(lambda self: is_fresh(self) and "b" in self.model.frozen)
    @action()
    def thaw(self):
        self.model.frozen.remove("b")
        self.driver.freeze("b", False)


class Misuse(Machine):
    """Calls that are refused: nothing changes, and training goes on."""

    @precondition(lambda self: self.model.outcome is not None)
    @action(call=st.sampled_from(["step", "unscale_"]))
    def after_step(self, call):
        self.refused(f"{call} after step", MisuseError, getattr(self.driver, call))

    @precondition(can_edit)
    @action()
    def clip_at_nothing(self):
        self.refused("clip at -1", SettingsError, self.driver.clip, -1.0)

    @precondition(lambda self: self.model.stale)
    @action()
    def step_after_load(self):
        self.refused("step after load_state_dict", MisuseError, self.driver.step)

    @precondition(can_edit)
    @action()
    def a_batch_too_late(self):
        """scale() after unscale_(): the window is given up."""
        made = gradients("unit", 1.0, None, self.names)
        self.model.batch(1.0, made)
        self.driver.batch(1.0, made)
        self.refused("a batch after unscale_", MisuseError, self.driver.step)
        self.driver.update()
        self.driver.zero_grad()
        self.count("window")
        self.model.update()

    def refused(self, name, kind, call, *given):
        before = self.driver.everything()
        try:
            call(*given)
        except kind:
            self.count("refused", name)
        else:
            raise AssertionError(f"{name} was not refused")
        assert self.driver.everything() == before


ACTIONS = {
    "update": Update,
    "give up": GiveUp,
    "unscale": Unscale,
    "clip": Clip,
    "edit": Edit,
    "clip by hand": ClipByHand,
    "retry": Retry,
    "accumulate": Accumulate,
    "save": Save,
    "groups": Groups,
    "misuse": Misuse,
}


def machine_for(Driver):
    """The machine of an adapter: the actions that its driver has."""
    start = initialize(
        rule=st.sampled_from(Driver.RULES),
        limits=st.sampled_from(Driver.LIMITS),
        journal=st.booleans(),
        to_none=st.booleans() if "give up" in Driver.CAN else st.just(True),
    )(Machine.start)
    name = f"{Driver.__name__}Machine"
    actions = (*(ACTIONS[a] for a in sorted(Driver.CAN)), Machine)
    return type(name, actions, {"Driver": Driver, "start": start, "__module__": Driver.__module__})


def any_order(machine, examples):
    """A seeded slice of its scripts: the same ones each time."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=chosen)
