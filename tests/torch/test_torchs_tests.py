"""What torch's own tests of gradient scaling check, in our words, for both classes."""

import copy
import math
from typing import NamedTuple

import pytest
import torch
from helpers.torch import bits

from gradlift.errors import MisuseError
from gradlift.torch import GradScaler

BOTH = {"torch": torch.amp.GradScaler, "gradlift": GradScaler}
both = pytest.mark.parametrize("kind", BOTH)


def pair(seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)) for _ in range(2)]


def batch(i, n=4):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(i))


def weights(*modules):
    return [bits(m) for m in modules]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def runs(loop, **settings):
    """What the loop returns for torch's class and for ours."""
    with_defaults = {"init_scale": 2.0**7, "growth_interval": 2, **settings}
    return [loop(kind("cpu", **with_defaults)) for kind in BOTH.values()]


def equal(loop, **settings):
    theirs, ours = runs(loop, **settings)
    assert theirs == ours
    return ours


# scale()


@both
def test_scale_keeps_nested_lists_and_tuples(kind):
    scaler = BOTH[kind]("cpu", init_scale=2.0)
    one, two = torch.full((1,), 4.0), torch.full((), 3.0, dtype=torch.float64)
    out = scaler.scale((one, (two, one), [two, (one, two)]))
    assert type(out) is tuple
    assert type(out[1]) is tuple
    assert type(out[2]) is list
    assert type(out[2][1]) is tuple
    flat = [out[0], *out[1], out[2][0], *out[2][1]]
    assert [x.item() for x in flat] == [8.0, 6.0, 8.0, 6.0, 8.0, 6.0]
    assert [x.dtype for x in flat[:2]] == [torch.float32, torch.float64]
    lazily = scaler.scale(x for x in (one, two))
    assert [x.item() for x in lazily] == [8.0, 6.0]


class Losses(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_dicts_and_named_tuples_are_scaled_too():
    """torch scales the keys of a dict, and cannot make a NamedTuple."""
    scaler, one = GradScaler("cpu", init_scale=2.0), torch.ones(())
    assert scaler.scale({"a": one, "b": [3 * one]}) == {"a": 2.0, "b": [6.0]}
    assert scaler.scale(Losses(one, 5 * one)) == Losses(2.0, 10.0)
    with pytest.raises(MisuseError, match="this is str"):
        scaler.scale("loss")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
def test_losses_of_any_shape_and_dtype_are_scaled_alike(dtype, shape):
    loss = torch.full(shape, 1.5, dtype=dtype)
    theirs, ours = (kind("cpu", init_scale=2.0**10).scale(loss) for kind in BOTH.values())
    assert torch.equal(theirs.double(), ours.double())
    assert ours.dtype is (dtype if dtype is torch.float64 else torch.float32)


@both
@pytest.mark.parametrize("wrong", [3.0, [torch.ones(()), 3.0]])
def test_what_is_no_tensor_is_refused(kind, wrong):
    with pytest.raises((ValueError, MisuseError)):
        BOTH[kind]("cpu").scale(wrong)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_of_losses_that_is_reduced_after_scaling(kind, dtype):
    w = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([w], lr=0.5), BOTH[kind]("cpu", init_scale=8.0)
    scaler.scale(w * torch.arange(3.0, dtype=dtype)).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [1.0, 0.5, 0.0]


# Loops


def test_clipping_between_unscale_and_step():
    def loop(scaler):
        (net, _), rows = pair(), []
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for i in range(8):
            optimizer.zero_grad()
            loss = net(batch(i)).square().mean() * (math.inf if i == 3 else 1.0)
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            else:  # the scale multiplied into the bound instead
                bound = 0.2 * scaler.get_scale()
                norm = torch.nn.utils.clip_grad_norm_(net.parameters(), bound)
            scaler.step(optimizer)
            scaler.update() if i != 3 else scaler.update(2.0**6)
            rows.append((str(norm.item()), scaler.get_scale(), weights(net)))
        return rows

    equal(loop)


def test_a_gradient_penalty():
    """Scaled gradients are made with create_graph, divided by hand and enter the loss."""

    def loop(scaler):
        (net, _), rows = pair(), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(6):
            optimizer.zero_grad()
            loss = net(batch(i)).square().mean()
            grads = torch.autograd.grad(scaler.scale(loss), net.parameters(), create_graph=True)
            penalty = sum((g / scaler.get_scale()).square().sum() for g in grads).sqrt()
            scaler.scale(loss + penalty).backward()
            scaler.step(optimizer)
            scaler.update()
            rows.append((scaler.get_scale(), weights(net)))
        return rows

    equal(loop)


def test_two_models_two_losses_two_optimizers():
    def loop(scaler):
        (a, b), rows = pair(), []
        opts = [torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.Adam(b.parameters(), lr=0.1)]
        for i in range(8):
            for o in opts:
                o.zero_grad()
            x, y = a(batch(i)), b(batch(i + 50))
            scaler.scale((0.3 * x + 0.7 * y).square().mean()).backward(retain_graph=True)
            scaler.scale((0.6 * x - 0.4 * y).square().mean()).backward()
            if i == 4:
                a[1].weight.grad[0, 0] = math.inf
            for o in opts:
                scaler.step(o)
            scaler.update()
            rows.append((scaler.get_scale(), weights(a, b)))
        return rows

    equal(loop)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("bad", [None, "d", "g"])
def test_the_order_of_a_gan(clips, bad):
    """Both are unscaled before either steps: the generator's loss gives the frozen discriminator
    no gradient."""

    def loop(scaler):
        (d, g), rows = pair(), []
        g[1] = torch.nn.Linear(8, 6)
        opt_d = torch.optim.Adam(d.parameters(), lr=0.1)
        opt_g = torch.optim.SGD(g.parameters(), lr=0.1, momentum=0.9)
        for i in range(6):
            opt_d.zero_grad()
            opt_g.zero_grad()
            fake = g(batch(i))
            loss = (d(batch(i + 50)) - 1).square().mean() + d(fake.detach()).square().mean()
            scaler.scale(loss * (math.inf if bad == "d" and i == 2 else 1.0)).backward()
            scaler.unscale_(opt_d)
            if clips:
                torch.nn.utils.clip_grad_norm_(d.parameters(), 0.1)
            d.requires_grad_(False)
            loss = (d(fake) - 1).square().mean()
            scaler.scale(loss * (math.nan if bad == "g" and i == 3 else 1.0)).backward()
            d.requires_grad_(True)
            scaler.unscale_(opt_g)
            if clips:
                torch.nn.utils.clip_grad_norm_(g.parameters(), 0.1)
            scaler.step(opt_d)
            scaler.step(opt_g)
            if bad is None or not isinstance(scaler, GradScaler):
                scaler.update()
            else:  # a loss that is not finite keeps our scale
                scaler.update(scaler.get_scale())
            rows.append(weights(d, g))
        return rows

    settings = {"growth_interval": 100} if bad else {}
    if bad is None:
        equal(loop, **settings)
    else:
        theirs, ours = runs(loop, **settings)
        assert theirs[:2] == ours[:2]
        assert len({str(row) for row in ours}) == len(ours)


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("look", ["unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("then", ["step", "unscale_", "clip_grad_norm_"])
def test_gradients_that_really_mix_are_refused(device_path, look, then):
    """torch applies their sum: one part scaled, the other not."""
    w = torch.nn.Parameter(torch.ones(2))
    v = torch.nn.Parameter(torch.ones(2))
    opt_d, opt_g = (torch.optim.SGD([p], lr=0.1) for p in (w, v))
    scaler = GradScaler("cpu")
    scaler._force_device_path = device_path
    scaler.scale(w.sum()).backward()
    getattr(scaler, look)(opt_d, *([1.0] if look != "unscale_" else []))
    scaler.scale((w * v).sum()).backward()
    scaler.unscale_(opt_g)
    for _ in range(2):
        with pytest.raises(MisuseError, match="mix scaled and unscaled"):
            getattr(scaler, then)(opt_d, *([1.0] if then == "clip_grad_norm_" else []))
    assert (w == 1).all()
    scaler.step(opt_g)  # its own are sound
    scaler.update()
    assert v.tolist() == pytest.approx([0.9, 0.9])


def test_a_gradient_edited_after_both_were_unscaled_is_no_mixture():
    w, v = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opts = [torch.optim.SGD([p], lr=1.0) for p in (w, v)]
    scaler = GradScaler("cpu")
    for p, o in zip((w, v), opts):
        scaler.scale(p.sum()).backward()
        scaler.unscale_(o)
        p.grad.mul_(2)  # right after its own unscale_
    w.grad.mul_(0.25)  # and once more, when nothing is scaled in between
    for o in opts:
        scaler.step(o)
    assert (w.tolist(), v.tolist()) == ([0.5, 0.5], [-1.0, -1.0])


# State


@both
@pytest.mark.filterwarnings("ignore:.*not a power of two")
def test_a_state_goes_round_and_moves_the_other_scaler(kind):
    first = BOTH[kind]("cpu", 3.0 * 2**8, 4.0, 0.5, 2)
    other = BOTH[kind]("cpu", 6.0, 7.0, 0.25, 1)
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval"):
        assert getattr(other, name)() == getattr(first, name)()
    assert other._get_growth_tracker() == 0
    off = BOTH[kind]("cpu", enabled=False)
    assert off.state_dict() == {}
    off.load_state_dict({})


@both
def test_a_scale_near_the_end_of_float32_does_not_become_infinite(kind):
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = BOTH[kind]("cpu", 2.0**125, 2.0**4, 0.5, 1)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((w * 2.0**-100).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert math.isfinite(scaler.get_scale())


# Misuse, where both refuse


@both
@pytest.mark.parametrize("call", ["step", "unscale_", "update"])
def test_nothing_was_scaled(kind, call):
    w = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), BOTH[kind]("cpu")
    w.sum().backward()
    if call == "update":
        if kind == "torch":  # ours has nothing to do
            with pytest.raises(AssertionError):
                scaler.update()
        else:
            scaler.update()
            assert scaler.get_scale() == 2.0**16
        return
    with pytest.raises((AssertionError, MisuseError)):
        getattr(scaler, call)(optimizer)
    assert w.item() == 1.0


@both
def test_a_second_step_before_update_is_refused(kind):
    w = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([w], lr=0.5), BOTH[kind]("cpu")
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError):
            call(optimizer)
    assert w.item() == 0.5


# A step that raised


class FailsOnce(torch.optim.SGD):
    failed = False

    def step(self, closure=None):
        if not self.failed:
            self.failed = True
            raise MemoryError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("first", ["nothing", "unscale_", "clip by hand"])
def test_a_step_that_raised_may_be_called_again(first):
    def loop(scaler):
        (net, _) = pair()
        optimizer = FailsOnce(net.parameters(), lr=0.1)
        for i in range(3):
            optimizer.zero_grad()
            scaler.scale(net(batch(i)).square().mean()).backward()
            if first != "nothing":
                scaler.unscale_(optimizer)
            if first == "clip by hand":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            try:
                scaler.step(optimizer)
            except MemoryError:
                scaler.step(optimizer)
            scaler.update()
        assert optimizer.failed
        return scaler.get_scale(), weights(net)

    equal(loop)


# float64


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("init_scale", [2.0**7, 1000.0, 2.0**-20])
@pytest.mark.parametrize("size", [1e-300, 1e-40, 1.0, 1e30])
@pytest.mark.filterwarnings("ignore:.*not a power of two")
def test_float64_gradients_of_any_size(how, init_scale, size):
    def loop(scaler):
        w = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        optimizer = torch.optim.Adam([w], lr=0.1, **how)
        slopes = torch.tensor([1.0, -2.0, 3.1, 0.7, 1 / 3], dtype=torch.float64) * size
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((w * slopes).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return bits(w.grad), bits(w), scaler.get_scale()

    equal(loop, init_scale=init_scale)
