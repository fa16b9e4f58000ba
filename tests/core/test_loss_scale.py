"""core/loss_scale.py: one scale and the path of its steps; core/result.py: how a step ends."""

import math
import pickle
import warnings

import pytest

from gradlift import Cause, Reading, Verdict, rules
from gradlift.core import Culprit, Finished, Limits, LossScale, Note, conclude
from gradlift.errors import StateError, TrainingHalted
from gradlift.rules import ScaleState

CLEAN = Reading(nonfinite=False, amax=1.0, norm=0.5)
OVERFLOW = Reading(nonfinite=True, amax=math.inf)
NOTHING = Reading(nonfinite=False, amax=0.0, checked=False, norm=0.0)


class Heard:
    """A listener that keeps what it gets."""

    def __init__(self):
        self.calls = []

    def step(self, finished, result):
        self.calls.append(("step", finished, result))

    def retry(self, finished, result):
        self.calls.append(("retry", finished, result))


def finished(scale, reading, **facts):
    return scale.finish(scale.decide(reading), **facts)


def test_a_story():
    heard = Heard()
    scale = LossScale("backoff:init_scale=16,growth_interval=2", listener=heard)
    first = finished(scale, CLEAN, loss=1.0, lr=0.1)
    second = finished(scale, OVERFLOW, loss=2.0, culprits=(Culprit("w", "inf"),), micro_batch=1)
    finished(scale, NOTHING)
    assert (first.verdict, first.grad_norm, first.scale) == (Verdict.APPLY, 0.5, 16.0)
    assert (second.cause, second.culprits, second.micro_batch) == (Cause.OVERFLOW, ("w",), 1)
    assert (scale.steps, scale.skipped_steps, scale.state.scale) == (3, 1, 8.0)
    assert scale.result.cause is Cause.NO_GRADIENTS
    assert math.isnan(scale.result.grad_norm)  # nothing was taken
    assert [(what, f.step, f.next_scale) for what, f, _ in heard.calls] == [
        ("step", 0, 16.0),
        ("step", 1, 8.0),
        ("step", 2, 8.0),
    ]
    assert [(f.loss, f.lr) for _, f, _ in heard.calls[:1]] == [(1.0, 0.1)]
    assert [r for *_, r in heard.calls] == [first, second, scale.result]


def test_deciding_changes_nothing():
    scale = LossScale("dynamic")
    before = scale.state_dict()
    scale.decide(OVERFLOW, retries_left=3)
    assert (scale.state_dict(), scale.result) == (before, None)


def test_the_last_try_is_not_lost():
    """Clean at 1, no scale above it is: the third and last try is at 1 again, and is applied."""
    heard = Heard()
    scale = LossScale("auto:sharp,init_scale=1", listener=heard)
    tiny = CLEAN._replace(amax=2.0**-20)
    scales, verdicts = [], []
    for left, reading in ((2, tiny), (1, OVERFLOW), (0, tiny)):
        decision = scale.decide(reading, retries_left=left)
        scales.append(scale.state.scale)
        verdicts.append((decision.verdict, decision.cause))
        if decision.verdict is Verdict.RETRY:
            scale.retry(decision)
    assert scales[0] == scales[2] == 1.0 < scales[1]
    assert verdicts == [
        (Verdict.RETRY, Cause.CALIBRATION),
        (Verdict.RETRY, Cause.OVERFLOW),
        (Verdict.APPLY, Cause.NONE),
    ]
    assert scale.finish(decision).retries == 2
    assert [what for what, *_ in heard.calls] == ["retry", "retry", "step"]
    assert [f.retries for _, f, _ in heard.calls] == [0, 1, 2]
    assert [f.step for _, f, _ in heard.calls] == [0, 0, 0]
    assert (scale.steps, scale.skipped_steps, scale.state.skips) == (1, 0, 0)
    assert finished(scale, tiny).retries == 0  # a new batch


def test_a_ceiling_holds_from_now_on():
    scale = LossScale("backoff:init_scale=2^17,growth_interval=1")
    scale.cap(2.0**15)
    assert scale.state.scale == 2.0**15
    finished(scale, CLEAN)
    assert scale.state.scale == 2.0**15


def test_auto_is_cautious_until_it_is_sharpened():
    scale = LossScale("auto")
    assert scale.rule == rules.parse("auto:cautious")
    scale.sharpen()
    assert (scale.rule, scale.state) == (rules.parse("auto"), rules.parse("auto").init())
    scale.sharpen()
    assert scale.rule == rules.parse("auto")


def test_sharpening_keeps_what_was_learned():
    scale = LossScale("auto")
    finished(scale, CLEAN)
    learned = scale.state
    scale.sharpen()
    assert scale.state == learned
    scale = LossScale("auto")
    finished(scale, OVERFLOW)  # the scale and the skip are kept, though nothing finite was seen
    fallen = scale.state
    scale.sharpen()
    wanted = rules.parse("auto").init()._replace(scale=fallen.scale, skips=1)
    assert scale.state == wanted


@pytest.mark.parametrize("rule", ["auto:cautious", "auto:sharp", "dynamic", rules.parse("auto")])
def test_what_was_said_outright_stays(rule):
    scale = LossScale(rule)
    scale.sharpen()
    assert scale.rule == rules.parse(rule)


def test_a_sharp_state_sharpens_and_a_cautious_one_does_not():
    sharp, cautious, fresh = LossScale("auto"), LossScale("auto"), LossScale("auto")
    sharp.sharpen()
    fresh.load_state_dict(cautious.state_dict())
    assert fresh.rule == rules.parse("auto:cautious")
    fresh.load_state_dict(sharp.state_dict())
    assert fresh.rule == rules.parse("auto")


def test_where_nothing_is_ever_retried_a_sharp_state_is_loaded_and_the_rule_stays_cautious():
    sharp, scale = LossScale("auto"), LossScale("auto", retries=False)
    sharp.sharpen()
    finished(sharp, CLEAN)
    scale.load_state_dict(sharp.state_dict())
    assert (scale.rule, scale.state) == (rules.parse("auto:cautious"), sharp.state)
    assert not scale.state_dict()["gradlift"]["sharp"]


def test_a_static_scale_that_a_float16_loss_has_capped_comes_back():
    scale, fresh = LossScale("static:2^17"), LossScale("static:2^17")
    scale.cap(2.0**15)
    finished(scale, CLEAN)
    fresh.load_state_dict(scale.state_dict())
    assert (fresh.state, fresh.state_dict()) == (scale.state, scale.state_dict())
    for other in ("static:2^16", "static:2^14"):
        with pytest.raises(StateError, match="outside this rule's"):
            fresh.load_state_dict(LossScale(other).state_dict())
    with pytest.raises(StateError, match="outside this rule's"):
        LossScale("static:2^12").load_state_dict(scale.state_dict())


def test_a_damaged_state_changes_nothing():
    scale = LossScale("auto")
    finished(scale, CLEAN)
    before, rule = scale.state_dict(), scale.rule
    other = LossScale("auto")
    other.sharpen()
    damaged = other.state_dict()
    damaged["gradlift"]["skipped"] = -1
    with pytest.raises(StateError, match="expected two counts"):
        scale.load_state_dict(damaged)
    assert (scale.state_dict(), scale.rule) == (before, rule)


# The end of a step

FLOOR = Finished(4, ScaleState(8.0, skips=1), 8.0, OVERFLOW, Cause.FLOOR, culprits=("w",))
RULE = rules.Backoff(init_scale=16, min_scale=8)


def test_the_listener_is_first_then_the_warning_then_the_halt():
    heard = Heard()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(TrainingHalted, match="2 steps in a row were skipped, since step 3"):
            conclude(FLOOR, RULE, Limits(1, "warn"), heard)
    assert [(what, result.verdict) for what, _, result in heard.calls] == [("step", Verdict.HALT)]
    assert [str(w.message) for w in caught] == [
        "non-finite gradients at the smallest scale, 2^3: the step was skipped and the scale held. "
        "First non-finite gradient: w"
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("package", ["mxnet.gluon", "keras", "torch.optim", "gradlift.torch"])
def test_a_warning_points_at_the_line_that_called_the_framework(package):
    framework = {"__name__": package, "conclude": conclude}
    exec("def step(*args): return conclude(*args)", framework)
    with pytest.warns(UserWarning, match="smallest scale") as caught:
        framework["step"](FLOOR, RULE, Limits(on_floor="warn"))
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("on_floor", ["hold", "warn", "raise"])
def test_only_the_floor_warns(on_floor):
    done = FLOOR._replace(cause=Cause.OVERFLOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert conclude(done, RULE, Limits(on_floor=on_floor)).verdict is Verdict.SKIP


def test_names_and_notes_survive_a_pickle():
    culprit = pickle.loads(pickle.dumps(Culprit("w", "nan")))
    note = pickle.loads(pickle.dumps(Note("code", "text", once=True)))
    assert (culprit, culprit.kind) == ("w", "nan")
    assert (note, note.code, note.once) == ("text", "code", True)
