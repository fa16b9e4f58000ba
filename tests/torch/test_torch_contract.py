"""What torch's own tests ask of a scaler, asked of both: private names, subclasses, saved states.

Each test runs with torch's class, and with gradlift's on its two paths.
"""

import copy
import functools
import gc
import io
import math
import pickle
import warnings
import weakref
from collections import defaultdict

import numpy as np
import pytest
import torch
from helpers.torch import bits
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradlift.torch import GradScaler

pytestmark = pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
PATHS = ["torch", "host", "device"]
both = pytest.mark.parametrize("path", PATHS)
kinds = pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])


def class_of(path):
    return torch.amp.GradScaler if path == "torch" else GradScaler


def made(path, kind=None, **settings):
    scaler = (kind or class_of(path))(
        "cpu", **{"init_scale": 8.0, "growth_interval": 2, **settings}
    )
    if path == "device":
        scaler._force_device_path = True
    return scaler


def weight(value=1.0, n=4, **settings):
    p = torch.nn.Parameter(torch.full((n,), value))
    return p, torch.optim.SGD([p], lr=0.5, **settings)


def trained(scaler, *, how=None, steps=12, bad=(3, 4, 8), by_hand=False, end=None, between=None):
    """Rows of scale, tracker and weights of a run in which some gradients are not finite."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **(how or {}))
    rows = []
    for i in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 3)).square().mean()).backward()
        if i in bad:
            model[2].weight.grad[0, 1] = math.inf
        if by_hand:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if between is not None:
            between(scaler, optimizer, i)
        scaler.step(optimizer)
        scaler.update()
        if end is not None:
            end(scaler, i)
        told = scaler.get_scale(), scaler._get_growth_tracker()
        rows.append((*told, [bits(p) for p in model.parameters()]))
    return rows


def same_as_torch(path, kind_of=class_of, **how):
    """The same run with torch's scaler, row by row."""
    rows = [trained(made(which, kind_of(which)), **how) for which in ("torch", path)]
    for i, (theirs, ours) in enumerate(zip(*rows, strict=True)):
        assert theirs == ours, f"step {i}"
    assert len({row[0] for row in rows[0]}) > 1


# The scale and its tracker


@both
def test_the_tensors_are_made_by_the_first_loss(path):
    scaler = made(path)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler._get_scale_async() is None
    assert (scaler._init_scale, scaler._init_growth_tracker) == (8.0, 0)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)
    scaler.scale(torch.ones(3))
    assert (scaler._scale.dtype, scaler._scale.shape) == (torch.float32, ())
    assert (scaler._growth_tracker.dtype, scaler._growth_tracker.shape) == (torch.int32, ())
    assert scaler._scale.item() == 8.0
    assert scaler._get_scale_async() is scaler._scale
    assert scaler._check_scale_growth_tracker("step") == (scaler._scale, scaler._growth_tracker)


@both
def test_the_tensors_are_live(path):
    scaler, (p, optimizer) = made(path), weight()
    scaler.scale(p.sum()).backward()
    held, tracker = scaler._scale, scaler._growth_tracker
    scaler.step(optimizer)
    scaler.update()
    assert (held.item(), tracker.item()) == (8.0, 1)
    p.grad[0] = math.nan
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert (held.item(), tracker.item()) == (4.0, 0)
    held.fill_(32.0)
    tracker.fill_(1)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 1)
    assert scaler.scale(torch.ones(())) == 32.0
    assert scaler.state_dict()["scale"] == 32.0
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 32.0


@both
def test_they_may_be_assigned(path):
    scaler = made(path)
    scaler._init_scale, scaler._init_growth_tracker = 32.0, 1
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 1)
    assert scaler.scale(torch.ones(())) == 32.0
    assert scaler._growth_tracker == 1
    mine = torch.tensor(4.0)
    scaler._scale, scaler._growth_tracker = mine, torch.tensor(0, dtype=torch.int32)
    assert scaler.scale(torch.ones(())) == 4.0
    scaler._scale.mul_(4)
    assert scaler.get_scale() == 16.0
    scaler._init_scale = 2.0  # too late
    assert scaler.get_scale() == 16.0
    scaler._scale = scaler._growth_tracker = None
    scaler._init_scale = 64.0
    assert scaler.scale(torch.ones(())) == 64.0
    scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval = 4.0, 0.25, 1
    told = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert told == (4.0, 0.25, 1)
    assert (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == told


@both
@pytest.mark.parametrize("by", ["update", "load_state_dict"])
def test_what_comes_later_counts(path, by):
    scaler = made(path)
    scaler.scale(torch.ones(()))
    saved = scaler.state_dict()
    scaler._scale.fill_(32.0)
    if by == "update":
        scaler.update(8.0)
    else:
        scaler.load_state_dict(saved)
    assert scaler.get_scale() == scaler._scale == 8.0


@both
def test_they_may_be_made_by_hand(path):
    scaler = made(path)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale == 8.0
    with pytest.raises((AssertionError, RuntimeError)):
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_scale_that_would_write_nan_is_refused(path, value):
    """torch divides by it."""
    scaler = made(path)
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="_scale is"):
        scaler._scale = torch.tensor(value)
    assert scaler.get_scale() == 8.0
    if path == "host":
        scaler._scale.fill_(value)
        with pytest.raises(ValueError, match="_scale is"):
            scaler.scale(torch.ones(()))


@kinds
@pytest.mark.parametrize("path", ["host", "device"])
def test_somebody_who_logs_and_lowers_the_scale(path, how):
    def end(scaler, i):
        assert scaler._scale.item() == scaler.get_scale()
        if i == 5:
            scaler._scale.mul_(0.5)
        if i == 6:
            scaler._scale = torch.tensor(2.0)
        if i == 7:
            scaler._growth_tracker.fill_(1)

    same_as_torch(path, end=end, how=how)


# What was found, by optimizer


@both
def test_stages_and_flags(path):
    scaler, (p, optimizer) = made(path), weight()
    scaler.scale((p * 2).sum()).backward()
    assert scaler._per_optimizer_states[id(optimizer)] == {
        "stage": OptState.READY,
        "found_inf_per_device": {},
    }
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"] is OptState.UNSCALED
    assert {d.type: v.item() for d, v in state["found_inf_per_device"].items()} == {"cpu": 0.0}
    assert scaler._found_inf_per_device(optimizer) is state["found_inf_per_device"]
    scaler.step(optimizer)
    assert state["stage"] is OptState.STEPPED
    scaler.update()
    assert not scaler._per_optimizer_states
    assert (p == 0).all()


@both
@pytest.mark.parametrize("bad", [False, True])
def test_a_check_without_unscaling(path, bad):
    scaler, (p, optimizer) = made(path), weight()
    scaler.scale((p * 2).sum()).backward()
    if bad:
        p.grad[1] = math.inf
    found = scaler._check_inf_per_device(optimizer)
    assert [v.item() for v in found.values()] == [float(bad)]
    assert p.grad[0] == 16.0
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler.step(optimizer)
    scaler.update()
    assert (p == float(bad)).all()


@both
@kinds
@pytest.mark.parametrize("early", [False, True], ids=["after unscale_", "after a check"])
def test_another_rank_found_something(path, how, early):
    """Ranks agree by reducing what was handed out: it counts, for the step and for the scale."""
    scaler, (p, optimizer) = made(path), weight(**how)
    scaler.scale((p * 2).sum()).backward()
    if early:
        scaler._check_inf_per_device(optimizer)
    else:
        scaler.unscale_(optimizer)
    if path == "torch" and early:
        return  # torch checks once more, and forgets it
    for v in scaler._found_inf_per_device(optimizer).values():
        v.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (p == 1).all()
    assert scaler.get_scale() == 4.0
    if path != "torch":
        assert (scaler.result.stepped, scaler.skipped_steps) == (False, 1)
        assert math.isnan(scaler.result.grad_norm)


@both
def test_what_is_written_between_step_and_update_moves_the_scale(path):
    scaler, (p, optimizer) = made(path), weight()
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer)
    for v in scaler._found_inf_per_device(optimizer).values():
        v.fill_(1.0)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert (p == 0).all()


@both
@pytest.mark.parametrize("cured", [False, True])
def test_a_flag_that_is_put_back_to_zero(path, cured):
    """Gradients were mended by hand. If they were not, torch writes NaN; gradlift looks."""
    if path == "torch" and not cured:
        return
    scaler, (p, optimizer) = made(path), weight()
    scaler.scale((p * 2).sum()).backward()
    p.grad[1] = math.nan
    scaler.unscale_(optimizer)
    if cured:
        p.grad[1] = 2.0
    for v in scaler._found_inf_per_device(optimizer).values():
        v.zero_()
    scaler.step(optimizer)
    scaler.update()
    assert (p == float(not cured)).all()
    assert scaler.get_scale() == (8.0 if cured else 4.0)


@both
def test_a_stage_that_is_put_back(path):
    """A closure's second evaluation: the gradients are new, and scaled."""
    scaler, (p, optimizer) = made(path), weight()
    for factor in (1.0, 2.0):
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
        p.grad = None
        scaler.scale((p * factor).sum()).backward()
        scaler.unscale_(optimizer)
        assert (p.grad == factor).all()
    scaler.step(optimizer)
    scaler.update()
    assert (p == 0).all()


# Subclasses


class Parts:
    """What subclasses of torch's scaler override, each in the way that trainers do it."""

    @staticmethod
    def unscale_grads(base):
        class Scaler(base):
            calls = 0

            def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
                self.calls += 1
                return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

        return Scaler

    @staticmethod
    def unscale(base):
        class Scaler(base):
            calls = 0

            def unscale_(self, optimizer):
                self.calls += 1
                super().unscale_(optimizer)

        return Scaler

    @staticmethod
    def unscale_from_scratch(base):
        """Sharded training: unscales by itself and reduces what it found."""

        class Scaler(base):
            calls = 0

            def unscale_(self, optimizer):
                self._check_scale_growth_tracker("unscale_")
                state = self._per_optimizer_states[id(optimizer)]
                if state["stage"] is not OptState.READY:
                    raise RuntimeError("twice")
                inverse = self._scale.double().reciprocal().float()
                fused = optimizer.param_groups[0]["fused"]
                found = torch.zeros(() if fused else (1,))  # torch's fused kernels want ()
                state["found_inf_per_device"] = self._unscale_grads_(
                    optimizer, inverse, found, True
                )
                state["stage"] = OptState.UNSCALED
                for v in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                    v.clamp_(max=1.0)
                self.calls += 1

        return Scaler

    @staticmethod
    def scale_from_scratch(base):
        class Scaler(base):
            calls = 0

            def scale(self, outputs):
                self.calls += 1
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(outputs.device)
                return (outputs * self._scale).to(outputs.dtype)

        return Scaler

    @staticmethod
    def maybe_opt_step(base):
        """Model parallel: all ranks' flags together decide."""

        class Scaler(base):
            calls = 0

            def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
                self.calls += 1
                flags = [v.item() for v in optimizer_state["found_inf_per_device"].values()]
                self.skipped = sum(flags) > 0
                return None if self.skipped else optimizer.step(*args, **kwargs)

        return Scaler

    @staticmethod
    def maybe_opt_step_of_base(base):
        class Scaler(base):
            calls = 0

            def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
                self.calls += 1
                return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

        return Scaler

    @staticmethod
    def update_from_scratch(base):
        """Hysteresis: the second overflow in a row lowers the scale."""

        class Scaler(base):
            calls, left = 0, 1

            def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
                flags = [v.item() for v in optimizer_state["found_inf_per_device"].values()]
                return None if sum(flags) else optimizer.step(*args, **kwargs)

            def update(self, new_scale=None):
                self.calls += 1
                scale, tracker = self._check_scale_growth_tracker("update")
                found = [
                    v
                    for state in self._per_optimizer_states.values()
                    for v in state["found_inf_per_device"].values()
                ]
                assert found
                bad = sum(v.item() for v in found) > 0
                self.left = self.left - 1 if bad else 1
                if bad and self.left >= 0:
                    tracker.fill_(0)
                else:
                    torch._amp_update_scale_(
                        scale,
                        tracker,
                        sum(found),
                        self._growth_factor,
                        self._backoff_factor,
                        self._growth_interval,
                    )
                self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

        return Scaler


PARTS = [name for name in vars(Parts) if not name.startswith("_")]


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("part", PARTS)
@kinds
@pytest.mark.parametrize("by_hand", [False, True], ids=["", "clipped by hand"])
def test_subclasses(path, part, how, by_hand):
    if how.get("fused") and part == "unscale_from_scratch" and not by_hand:
        pytest.skip("torch's step() never calls unscale_() of a fused optimizer")
    built = {which: getattr(Parts, part)(class_of(which)) for which in ("torch", path)}
    scalers = {which: made(which, kind) for which, kind in built.items()}
    rows = {which: trained(s, how=how, by_hand=by_hand) for which, s in scalers.items()}
    assert rows["torch"] == rows[path]
    assert len({row[0] for row in rows[path]}) > 1
    calls = {which: s.calls for which, s in scalers.items()}
    assert calls["torch"] == calls[path]
    assert scalers[path].skipped_steps == 3


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("part", PARTS)
def test_subclasses_say_what_happened(path, part):
    scaler, (p, optimizer) = made(path, getattr(Parts, part)(GradScaler)), weight()
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert (scaler.result.stepped, scaler.result.scale) == (True, 8.0)
    torch.testing.assert_close(p, torch.full((4,), 0.75))  # (2, 2, 2, 2) clipped at 1
    before = bits(p)
    p.grad[2] = math.inf
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.result.stepped, scaler.consecutive_skips) == (False, 1)
    assert bits(p) == before


@pytest.mark.parametrize("path", ["host", "device"])
def test_a_closure_that_steps_by_private_names(path):
    """Closures under AMP: zero, backward, unscale and decide inside optimizer.step()."""

    def closing(base):
        class Scaler(base):
            def step(self, optimizer, *args, **kwargs):
                closure = kwargs["closure"]

                def scaled():
                    self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
                    optimizer.zero_grad()
                    value = closure()
                    self._check_scale_growth_tracker("step")
                    state = self._per_optimizer_states[id(optimizer)]
                    if state["stage"] is OptState.READY:
                        self.unscale_(optimizer)
                    found = sum(v.item() for v in state["found_inf_per_device"].values())
                    return None if found else value

                return optimizer.step(closure=scaled)

        return Scaler

    class Twice(torch.optim.SGD):
        """Two evaluations, and a step if both were sound."""

        def step(self, closure):
            with torch.enable_grad():
                values = [closure() for _ in range(2)]
            return super().step() if None not in values else None

    runs = []
    for which in ("torch", path):
        scaler = made(which, closing(class_of(which)))
        p, rows = torch.nn.Parameter(torch.ones(3)), []
        optimizer = Twice([p], lr=0.1)
        for i in range(6):

            def closure(i=i, p=p, scaler=scaler):
                loss = (p**2).sum()
                scaler.scale(loss).backward()
                if i in (2, 3):
                    p.grad[0] = math.inf
                return loss

            scaler.step(optimizer, closure=closure)
            scaler.update()
            rows.append((scaler.get_scale(), bits(p)))
        runs.append(rows)
    assert runs[0] == runs[1]


# Optimizers that take the scale and the verdict


class Takes(torch.optim.SGD):
    """Another's fused optimizer, which divides and skips by itself."""

    _step_supports_amp_scaling = True
    seen = ()

    @torch.no_grad()
    def step(self, closure=None):
        scale, found = self.grad_scale, self.found_inf
        self.seen = (None if scale is None else float(scale), float(found))
        for p in self.param_groups[0]["params"]:
            if not found:
                p -= 0.5 * p.grad / (1.0 if scale is None else scale)


@both
@pytest.mark.parametrize("unscaled", [False, True])
def test_an_optimizer_that_reads_both(path, unscaled):
    scaler, (p, _) = made(path), weight()
    optimizer = Takes([p], lr=0.5)
    scaler.scale((p * 2).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    nothing = None if path == "torch" else 1.0  # gradlift always hands a tensor over
    assert optimizer.seen == (nothing if unscaled else 8.0, 0.0)
    assert (p == 0).all()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@both
def test_a_scale_of_one_is_handed_over_too(path):
    scaler, (p, _) = made(path, init_scale=1.0), weight()
    optimizer = Takes([p], lr=0.5)
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.seen == (1.0, 0.0)
    assert (p == 0).all()


@both
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scale_that_was_there_before(path, name, unscaled):
    """Somebody else's factor is divided out as well, and taken away after the step."""
    p = torch.nn.Parameter(torch.ones(5, 5))
    optimizer = getattr(torch.optim, name)([p], lr=0.1, fused=True)
    scaler = made(path, init_scale=2.0**16)
    scaler.scale(torch.ones(5))
    p.grad = torch.ones(5, 5)
    optimizer.grad_scale = torch.tensor([3.0])
    if unscaled:
        scaler.unscale_(optimizer)
        assert optimizer.grad_scale == 3.0
        assert not hasattr(optimizer, "found_inf")
    scaler.step(optimizer)
    scaler.update()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    torch.testing.assert_close(p.grad, torch.full((5, 5), 1 / (3 * 65536)))


@both
def test_optimizers_by_signature(path):
    class Keyword(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            assert isinstance(grad_scaler, torch.amp.GradScaler)
            assert not hasattr(self, "grad_scale")
            assert not hasattr(self, "found_inf")
            grad_scaler.unscale_(self)
            found = grad_scaler._found_inf_per_device(self)
            if not sum(v.item() for v in found.values()):
                return super().step()

    scaler, (p, _) = made(path), weight()
    optimizer = Keyword([p], lr=0.5)
    for value, after in ((2.0, 0.0), (math.inf, 0.0), (-2.0, 1.0)):
        optimizer.zero_grad()
        scaler.scale((p * 2).sum()).backward()
        p.grad.fill_(value * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        assert (p == after).all()
    assert scaler.get_scale() == 4.0


@both
def test_ranks_agree_inside_an_optimizer_that_takes_the_scaler(path):
    """The flag that it writes to counts in update()."""

    class Keyword(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            for v in grad_scaler._check_inf_per_device(self).values():
                v.fill_(1.0)

    scaler, (p, _) = made(path), weight()
    optimizer = Keyword([p], lr=0.5)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), p[0].item()) == (4.0, 1.0)


# Losses and gradients of all kinds


@both
def test_containers_of_losses(path):
    scaler, x = made(path), torch.full((1,), 4.0)
    given = [x.clone(), (x.clone(), x.clone()), [x.clone(), (x.clone(), x.clone())]]
    found = scaler.scale(given)
    assert found[0] == 32.0
    assert (type(found), type(found[1]), type(found[2][1])) == (list, tuple, tuple)
    assert found[2][1][1] == 32.0
    assert next(iter(scaler.scale(iter([x])))) == 32.0
    for wrong in (None, 3.0):
        with pytest.raises((ValueError, RuntimeError)):
            scaler.scale(wrong)


@both
@pytest.mark.parametrize("bad", range(-1, 5))
def test_a_storm_of_gradients(path, bad):
    """Dtypes, layouts and views in one optimizer; wherever inf is, it is found."""
    full = functools.partial(torch.full, fill_value=4.0)
    grads = [
        full((4, 4)),
        full((4, 4), dtype=torch.float64),
        full((4, 4), dtype=torch.bfloat16),
        full((4, 8)).t()[:, ::2],
        full((2, 3, 4, 4)).to(memory_format=torch.channels_last),
    ]
    params = [torch.empty_like(g) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    if bad >= 0:
        grads[bad][1, 1] = math.inf
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), made(path)
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.25), torch.tensor(0.0), True)
    assert [v.item() for v in found.values()] == [float(bad >= 0)]
    if bad < 0:
        assert all((g == 1).all() for g in grads)


@both
@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients_are_unscaled(path, bad):
    p = torch.nn.Parameter(torch.zeros(2, 3))
    values = torch.tensor([16.0, 32.0, math.inf if bad else 8.0])
    p.grad = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values, (2, 3))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), made(path)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")] == float(bad)
    if not bad:
        assert p.grad.to_dense().tolist() == [[0, 0, 2], [4, 0, 1]]


@both
@pytest.mark.filterwarnings("ignore:.*(not a power of two|outside)")
def test_a_scale_near_the_end_of_float32_stays_finite(path):
    p = torch.nn.Parameter(torch.full((5,), 1e-20))
    optimizer = torch.optim.Adam([p])
    scaler = made(path, init_scale=1e38, growth_factor=16.0, growth_interval=1)
    scaler.scale((p * 1e-20).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._scale.isfinite()
    assert p.isfinite().all()


@both
def test_a_step_returns_what_the_optimizer_does(path):
    class Answers(torch.optim.SGD):
        def step(self):
            super().step()
            return 42.0

    p = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = Answers([p], lr=0.5), made(path)
    for value, answer in ((math.inf, None), (1.0, 42.0)):
        scaler.scale(torch.zeros(()))
        p.grad = torch.full((2,), value)
        assert scaler.step(optimizer) == answer
        scaler.update()


@both
@pytest.mark.parametrize("kind", ["", "foreach", "fused"])
def test_gradients_that_are_spoiled_after_unscale(path, kind):
    """torch's tests expect NaN weights here; gradlift reads what was changed."""
    p, optimizer = weight(**({kind: True} if kind else {}))
    scaler = made(path)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    p.grad.mul_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert p.isfinite().all() == (path != "torch")


def loop(path, body, *, enabled=True):
    """Weights of a loop over twelve batches, one of which overflows where there is a scaler."""
    torch.manual_seed(1)
    nets = [torch.nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.25) for net in nets]
    scaler = made(path, init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)
    for i in range(12):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        if i == 5:
            x[0, 0] = math.inf
        for optimizer in optimizers:
            optimizer.zero_grad()
        body(scaler, nets, optimizers, x, y, i)
    return [bits(p) for net in nets for p in net.parameters()], scaler.get_scale()


def plain(scaler, nets, optimizers, x, y, i):
    scaler.scale((nets[1](nets[0](x)) - y).square().mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def clipped(scaler, nets, optimizers, x, y, i):
    scaler.scale((nets[1](nets[0](x)) - y).square().mean()).backward()
    limit = 0.2 * scaler.get_scale()
    for net in nets:  # scaled gradients, a scaled limit
        torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def unscaled(scaler, nets, optimizers, x, y, i):
    scaler.scale((nets[1](nets[0](x)) - y).square().mean()).backward()
    for net, optimizer in zip(nets, optimizers, strict=True):
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2, error_if_nonfinite=False)
        scaler.step(optimizer)
    scaler.update()


def penalty(scaler, nets, optimizers, x, y, i):
    if i == 5:
        return
    params = [p for net in nets for p in net.parameters()]
    loss = (nets[1](nets[0](x)) - y).square().mean()
    grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
    norm = sum((g / scaler.get_scale()).square().sum() for g in grads).sqrt()
    scaler.scale(loss + norm).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def accumulated(scaler, nets, optimizers, x, y, i):
    for part in range(4):
        loss = (nets[1](nets[0](x[part::4])) - y[part::4]).square().mean() / 4
        scaler.scale(loss).backward()
    if i % 2:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def two_losses(scaler, nets, optimizers, x, y, i):
    first, second = nets[0](x), nets[1](x.nan_to_num(posinf=1.0))
    scaler.scale((first - y).square().mean()).backward()
    scaler.scale((second - y).square().mean()).backward()
    scaler.unscale_(optimizers[0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def by_tensor(scaler, nets, optimizers, x, y, i):
    plain(scaler, nets, optimizers, x, y, i)
    if i == 3 and scaler.is_enabled():
        scaler.update(torch.tensor(2.0**7))


BODIES = [plain, clipped, unscaled, penalty, accumulated, two_losses, by_tensor]


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("enabled", [True, False])
def test_loops(path, body, enabled):
    (theirs, their_scale), (ours, our_scale) = (
        loop(which, body, enabled=enabled) for which in ("torch", path)
    )
    assert theirs == ours
    if body in (plain, by_tensor, unscaled) and enabled:
        assert our_scale >= their_scale  # the inf is in a loss, which gradlift does not blame
    else:
        assert our_scale in (their_scale, 2 * their_scale, 4 * their_scale)


# Settings and states that torch takes


@both
@pytest.mark.parametrize(
    "value", [1024, np.float32(1024), np.int64(1024), np.float64(1024), torch.tensor(1024.0)]
)
def test_kinds_of_numbers(path, value):
    scaler = made(
        path, init_scale=value, growth_factor=np.float32(4), backoff_factor=np.float64(0.25)
    )
    assert scaler.get_scale() == 1024.0
    assert scaler.scale(torch.ones(())) == 1024.0
    scaler.set_growth_factor(np.float32(8))
    assert scaler.get_growth_factor() == 8.0


def test_a_scale_that_is_no_power_of_two_warns_once():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scaler = GradScaler("cpu", init_scale=np.float32(1000))
        assert scaler.scale(torch.ones(())) == 1000.0
        assert scaler._scale == 1000.0
    assert len(seen) == 1
    assert "init_scale=1000.0: not a power of two" in str(seen[0].message)


@both
@pytest.mark.parametrize("interval", [2**31 - 1, 2**31, 10**12])
def test_an_interval_that_never_ends(path, interval):
    scaler, (p, optimizer) = made(path, growth_interval=interval), weight()
    scaler.scale(p.sum()).backward()
    scaler._growth_tracker.fill_(2**31 - 4)
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(torch.zeros(()))
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 2**31 - 2)
    saved = scaler.state_dict()
    assert saved["growth_interval"] == interval
    fresh = made(path)
    fresh.load_state_dict(saved)
    assert fresh.get_growth_interval() == interval


@both
@pytest.mark.parametrize("by", ["setters", "checkpoint"])
def test_factors_of_one(path, by):
    """A scale that is to stay where it is."""
    scaler, (p, optimizer) = made(path, growth_interval=1), weight()
    if by == "setters":
        scaler.set_growth_factor(1.0)
        scaler.set_backoff_factor(1.0)
    else:
        state = scaler.state_dict() | {"growth_factor": 1.0, "backoff_factor": 1.0}
        scaler.load_state_dict(state)
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        if bad:
            p.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0
    assert (p == 0).all()
    assert scaler.state_dict()["backoff_factor"] == 1.0


@both
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kinds", [(torch.tensor, torch.tensor), (np.float64, np.int64)])
def test_numbers_of_arrays_in_a_state(path, begun, kinds):
    """Some save the tensors themselves."""
    source = made(path, init_scale=4.0, growth_factor=4.0, growth_interval=7)
    scaler = made(path)
    scaler._init_growth_tracker = 7
    if begun:
        scaler.scale(torch.ones(()))
    state = source.state_dict()
    real, whole = kinds
    scaler.load_state_dict({**state, "scale": real(4.0), "_growth_tracker": whole(3)})
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 3)
    assert (scaler.get_growth_factor(), scaler.get_growth_interval()) == (4.0, 7)
    assert scaler.scale(torch.ones(())) == 4.0


@both
def test_an_optimizer_with_slots(path):
    class Wrapper:
        __slots__ = ("inner",)

        def __init__(self, inner):
            self.inner = inner

        @property
        def param_groups(self):
            return self.inner.param_groups

        def step(self):
            return self.inner.step()

    scaler, (p, inner) = made(path), weight()
    optimizer = Wrapper(inner)
    for value, after in ((1.0, 0.5), (math.inf, 0.5), (1.0, 0.0)):
        p.grad = None
        scaler.scale(p.sum()).backward()
        p.grad.mul_(value)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (p == after).all()


@pytest.mark.parametrize("path", ["host", "device"])
def test_an_optimizer_that_is_gone_is_forgotten(path):
    scaler = made(path)
    for _ in range(3):
        p, optimizer = weight()
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.result  # noqa: B018  (the last window holds the optimizer)
    gone = weakref.ref(optimizer)
    del p, optimizer
    scaler._last = None
    gc.collect()
    assert gone() is None
    scale = scaler._scales[None]
    assert (scale.optimizers, scale.known, scale.groups, scale.checked) == ([], {}, {}, {})


# Errors


@both
def test_types_of_errors(path):
    scaler = made(path)
    with pytest.raises(RuntimeError):
        scaler.load_state_dict({})
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([half], lr=0.5)
    scaler.scale(half.sum()).backward()
    with pytest.raises(ValueError):
        scaler.unscale_(optimizer)
    p, optimizer = weight()
    scaler = made(path)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError):
        scaler.unscale_(optimizer)


# Copies; a scaler that is off


@both
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
@pytest.mark.parametrize("begun", [False, True])
def test_copies(path, how, begun):
    scaler, (p, optimizer) = made(path, growth_factor=4.0, backoff_factor=0.25), weight()
    if begun:
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler._growth_tracker == 1  # handed out: a copy has its own
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(scaler))
    elif how == "deepcopy":
        twin = copy.deepcopy(scaler)
    else:
        file = io.BytesIO()
        torch.save(scaler, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert twin.state_dict() == scaler.state_dict()
    assert twin.scale(torch.ones(())) == 8.0
    twin._scale.fill_(2.0)
    assert scaler.get_scale() == 8.0


@both
def test_a_scaler_in_mid_step_is_not_copied(path):
    scaler, (p, optimizer) = made(path), weight()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises((AssertionError, RuntimeError)):
        pickle.dumps(scaler)


@pytest.mark.parametrize("path", ["torch", "host"])
def test_a_scaler_that_is_off_takes_anything(path):
    class Counts:
        def step(self, *args, **kwargs):
            return args, kwargs

    scaler = class_of(path)("cpu", "far", 0, 7, None, False)
    assert scaler.scale("x") == "x"
    assert scaler.unscale_(None) is None
    assert scaler.update("y") is None
    assert scaler.load_state_dict(7) is None
    assert scaler.state_dict() == {}
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1.0, 0)
    assert not scaler.is_enabled()
    assert scaler.step(Counts(), 1, closure=3, x=2) == ((1,), {"closure": 3, "x": 2})
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert not twin.is_enabled()
    off = made(path, kind=Parts.unscale_from_scratch(class_of(path)), enabled=False)
    p, optimizer = weight()
    off.scale(p.sum()).backward()
    off.step(optimizer)
    off.update()
    assert (p == 0.5).all()
