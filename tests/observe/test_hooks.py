"""The hooks in one process: what they record, that they only read, and that nothing stays."""

import copy
import gc
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optim_module
from torch.utils._python_dispatch import TorchDispatchMode

import gradlift
from gradlift import Cause, Verdict
from gradlift.journal import recorder


def net(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


@pytest.fixture
def record(tmp_path):
    """A recording whose gradients are looked at in each step."""
    return lambda **more: gradlift.record(tmp_path / "run.jsonl", **{"every": 1, **more})


def train(model, optimizer, scaler=None, factors=(1.0, 1.0, 1.0), clip=None, **more):
    for factor in factors:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * factor
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            clip(model.parameters())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


# What is recorded


def test_a_line_has_the_scale_before_and_after_the_verdict_and_the_cause(record):
    model = net(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    nan = float("nan")
    with record() as session:
        train(model, optimizer, scaler, (1.0, 1e39, nan, 1.0, 1.0, 1.0))
    steps = session.run.steps
    assert [(s.scale, s.next_scale) for s in steps] == [
        (8.0, 8.0),
        (8.0, 4.0),
        (4.0, 2.0),
        (2.0, 2.0),
        (2.0, 4.0),
        (4.0, 4.0),
    ]
    assert [s.verdict for s in steps[:3]] == [Verdict.APPLY, Verdict.SKIP, Verdict.SKIP]
    assert [s.cause for s in steps[:3]] == [Cause.NONE, Cause.LOSS_NONFINITE, Cause.LOSS_NONFINITE]
    assert steps[1].culprits == ("1.bias", "1.weight", "0.bias", "0.weight")
    assert session.run.skipped == 2
    assert steps[0].lr == 0.1
    assert str(gradlift.rules.parse(session.run.header["rule"])).startswith("backoff:init_scale=8")


def test_an_overflow_is_the_scales_and_amax_is_scaled_norm_is_not(record):
    w = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with record() as session:
        for x in (2.0, 3e38, 2.0):
            optimizer.zero_grad()
            scaler.scale((w * x).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([w], 1.0)  # makes every gradient NaN after an overflow
            scaler.step(optimizer)
            scaler.update()
    first, second, third = session.run.steps
    assert (first.amax, first.norm, first.loss) == (2048.0, 4.0, 0.0)
    assert (second.cause, second.verdict) == (Cause.OVERFLOW, Verdict.SKIP)
    (skip,) = [e for e in session.run.events if e.what == "skip"]
    assert "(inf)" in skip.detail["culprits"][0]  # as backward left it
    assert third.scale == 2.0**9


@pytest.mark.parametrize("late", [False, True], ids=["host", "device path"])
def test_a_device_sends_its_numbers_one_step_later(late, record):
    model = net(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with record() as session:
        session._hooks.force_late = late
        train(model, optimizer, scaler, (1.0, 1.0, float("nan")))
        assert len(session.run.steps) == (2 if late else 3)
    steps = session.run.steps
    assert [s.cause for s in steps] == [Cause.NONE, Cause.NONE, Cause.LOSS_NONFINITE]
    assert all(s.amax > 0 and s.norm > 0 for s in steps[:2])
    assert steps[2].culprits[0] == "1.bias"


def test_an_optimizer_without_a_scaler(record):
    model, never = net(4, 8, 1), net(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    idle = torch.optim.SGD(never.parameters(), lr=0.1)
    with record() as session:
        train(model, optimizer)
        idle.step()
        train(model, optimizer, factors=(float("nan"),))
    steps = [s for s in session.run.steps if not s.key]
    assert session.run.header["rule"] == "off"
    assert {s.scale for s in steps} == {1.0}
    assert [s.cause for s in steps] == [Cause.NONE] * 3 + [Cause.LOSS_NONFINITE]
    assert steps[3].verdict is Verdict.APPLY  # the weights are NaN now, and that is what it says
    assert steps[3].nonfinite
    assert steps[3].culprits[0] == "1.bias"
    (other,) = [s for s in session.run.steps if s.key == "optimizer 2"]
    assert (other.cause, other.skipped) == (Cause.NO_GRADIENTS, False)
    assert "No scaler was seen" in session.what_was_seen


def test_several_optimizers_step_on_one_loss_and_each_net_of_a_gan_on_its_own(record):
    a, b = (nn.Parameter(torch.ones(1)) for _ in range(2))
    first, second = (torch.optim.SGD([p], lr=0.0) for p in (a, b))
    with record() as session:
        (a * 3 + b).sum().backward()
        first.step(), second.step()
        (a * 7).sum().backward()
        first.step()
        (b * 9).sum().backward()
        second.step()
    told = {(s.key, s.step): s.loss for s in session.run.steps}
    assert told == {
        ("", 0): 4.0,
        ("optimizer 2", 0): 4.0,
        ("", 1): 7.0,
        ("optimizer 2", 1): 9.0,
    }


def test_an_optimizer_inside_an_optimizer_is_one_step(record):
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            if fail:
                raise RuntimeError("not today")
            return inner.step()

    w = nn.Parameter(torch.ones(2))
    inner, outer = torch.optim.SGD([w], lr=0.1), Outer([w], lr=0.2)
    with record() as session:
        for fail in (False, True, False):  # noqa: B007
            w.sum().backward()
            try:
                outer.step()
            except RuntimeError:
                continue
    assert [(s.step, s.lr, s.key) for s in session.run.steps] == [(0, 0.2, ""), (1, 0.2, "")]


def test_a_scaler_of_ones_own_that_calls_its_parent(record):
    with record() as session:

        class Scaler(torch.amp.GradScaler):
            def scale(self, outputs):
                return super().scale(outputs)

            def step(self, optimizer, *args, **kwargs):
                return super().step(optimizer, *args, **kwargs)

        model = net(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = copy.deepcopy(model.state_dict())
        train(model, optimizer, Scaler("cpu"))
        scaler = Scaler("cpu")
        scaler.scale(outputs=model(torch.ones(1, 4)).mean()).backward()
        scaler.step(optimizer=optimizer)
        scaler.update()
        model.load_state_dict(start)
        train(model, optimizer, torch.amp.GradScaler("cpu"))
    assert [s.key for s in session.run.steps] == ["", "", "", "scaler 2", *["scaler 3"] * 3]
    own, torchs = session.run.steps[:3], session.run.steps[4:]
    for name in ("loss", "norm", "amax"):
        assert [getattr(s, name) for s in own] == [getattr(s, name) for s in torchs]
    assert recorder.depth == 0


def test_gradients_are_looked_at_before_clipping_by_any_name_and_of_any_kind(record):
    clip = torch.nn.utils.clip_grad_norm_  # taken before the recording began
    globals()["clip_grad_norm_"] = clip
    model = net(4, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with record() as session:
        for way in (
            lambda params: clip_grad_norm_(params, 1.0),  # noqa: F821
            lambda params: nn.utils.clip_grad_norm_(list(params), 1.0),
            lambda params: nn.utils.clip_grad_norm_(iter(list(params)), 1.0),
            lambda params: nn.utils.clip_grad_value_(params, 0.5),
        ):
            train(model, optimizer, factors=(1.0,), clip=way)
    assert [s.amax for s in session.run.steps] == [10.0] * 4
    assert globals().pop("clip_grad_norm_") is clip


def test_between_two_looks_only_what_is_bad_is_looked_at(tmp_path):
    model = net(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    factors = [1.0] * 33
    factors[17] = float("nan")
    with gradlift.record(tmp_path / "run.jsonl", every=100) as session:
        train(model, optimizer, scaler, factors)
    looked = [s.step for s in session.run.steps if s.amax == s.amax]
    assert looked == [*range(10), 20]
    assert session.run.steps[17].culprits == ("0.bias", "0.weight")
    assert [s.step for s in session.run.samples] == [0, 20]  # more often in the first steps


def test_what_a_hook_cannot_read_is_noted_once_and_training_goes_on(record, monkeypatch):
    from gradlift.observe.torch import hooks as torch_hooks

    def broken(*args, **kwargs):
        raise ArithmeticError("no such tensor")

    model = net(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with record() as session:
        monkeypatch.setattr(torch_hooks, "look", broken)
        train(model, optimizer)
    (note,) = [e for e in session.run.events if e.detail.get("code") == "observer"]
    assert "no such tensor" in note.detail["text"]
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


# Nothing is changed


def address(t):
    """Where its numbers lie; None for a tensor that has none of its own, such as a DTensor, or
    those that torch.compile has left behind."""
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:
        return None


class OnlyReads(TorchDispatchMode):
    """Fails on an operation that writes to a tensor of the script."""

    def __init__(self, tensors):
        self.storages = {at for t in tensors if (at := address(t)) is not None}
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        for given, argument in zip(args, func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for t in given if isinstance(given, (list, tuple)) else [given]:
                    assert address(t) not in self.storages, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("late", [False, True], ids=["host", "device path"])
def test_no_hook_writes_to_a_tensor_of_the_script(late, record, monkeypatch):
    from gradlift.observe.torch.hooks import Hooks

    model = net(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen, plain = [], Hooks._reading

    def reading(self, read, *args):
        theirs = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        theirs += [p.grad for p in model.parameters() if p.grad is not None]
        with OnlyReads(theirs) as mode:
            done = plain(self, read, *args)
        seen.append(mode.seen)
        return done

    monkeypatch.setattr(Hooks, "_reading", reading)
    with record() as session:
        session._hooks.force_late = late
        clip = lambda params: nn.utils.clip_grad_norm_(params, 1.0)
        train(model, optimizer, scaler, (1.0, float("nan"), 1.0), clip)
        train(model, optimizer, None, (1.0, float("nan"), 1.0), clip)
    assert len(session.run.steps) == 6
    assert not [e for e in session.run.events if e.detail.get("code") == "observer"]
    assert sum(seen) > 50


def test_the_guard_against_writes_can_fail():
    t = torch.ones(2)
    with pytest.raises(AssertionError), OnlyReads([t]):
        t.mul_(2)


def test_everything_is_put_back(record):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    def there():
        homes = torch.amp, torch.amp.grad_scaler, torch.cuda.amp, torch.cpu.amp, torch.nn.utils
        homes += torch.nn.utils.clip_grad, torch.autograd
        kinds = torch.amp.GradScaler, ShardedGradScaler, gradlift.torch.GradScaler, nn.Module
        hooks = optim_module._global_optimizer_pre_hooks, optim_module._global_optimizer_post_hooks
        import sys

        return [dict(vars(x)) for x in (*homes, *kinds)], *map(dict, hooks), list(sys.meta_path)

    import gradlift.torch

    before = there()
    for more in ({}, {"rerun": False, "rule": "auto"}):
        with record(**more):
            assert there() != before
        assert there() == before
    with pytest.raises(ZeroDivisionError), record():
        raise ZeroDivisionError
    assert there() == before
    assert gradlift.journal.current() is None


def test_hooks_that_only_read_are_known_to_masters(record):
    from gradlift.torch import MasterWeights
    from gradlift.torch.gradient_source import gradients_of

    optimizer = MasterWeights(torch.optim.SGD, net(4, 1).half().parameters(), lr=0.1)
    with record():
        assert not gradients_of(optimizer).has_hooks()
        handle = optim_module.register_optimizer_step_pre_hook(lambda *_: None)
        assert gradients_of(optimizer).has_hooks()
        handle.remove()


def test_a_parameter_of_a_single_number_is_weighed_as_others_are(tmp_path):
    """Such as the learned temperature of a contrastive loss."""
    w, t = (torch.nn.Parameter(torch.tensor(x)) for x in ([1.0, 2.0], 3.0))
    optimizer = torch.optim.SGD([w, t], lr=0.5)
    with gradlift.record(tmp_path / "run.jsonl", every=2) as session:
        for _ in range(3):
            optimizer.zero_grad()
            (w.sum() * t).backward()
            optimizer.step()
    run = session.run
    assert [len(sample.parameters) for sample in run.weights] == [2, 2, 2]
    assert [e for e in run.events if e.detail.get("code") == "observer"] == []


@pytest.mark.parametrize(
    ("kind", "share"), [("Adam", 1), ("RMSprop", 1), ("Adagrad", 1), ("Adadelta", None)]
)
def test_second_moments_below_eps_by_whatever_name(kind, share, tmp_path):
    """Adadelta adds its eps to the moment, not to the root."""
    model = nn.Linear(4, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, eps=10.0)
    with gradlift.record(tmp_path / "run.jsonl") as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    assert session.run.weights[-1].parameters["weight"].get("below_eps") == share
