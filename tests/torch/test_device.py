"""The accelerator's path without an accelerator.

On CPU tensors, which are made to take it; on meta tensors, which have a device but no values, so
that whoever reads one is caught; and on fake tensors of a pretended device, with torch's own fused
optimizers. Fake CUDA tensors will not do: in a build without CUDA, autograd and copy_ abort.
"""

import functools
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from helpers import PYTHONPATH
from helpers.torch import bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradlift import Cause
from gradlift.torch import GradScaler
from gradlift.torch.scaler.on_device import Transfer

META = "meta"
RULES = ["dynamic:growth_interval=3", "auto", "megatron:growth_interval=3"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# (a) The same results as the path in numbers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below = torch.nn.Linear(5, 7)
        self.above = torch.nn.Linear(7, 2)
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.above(torch.tanh(self.below(x))).square().mean() + self.empty.sum()


def plan(seed, steps, micro_batches):
    """For each micro-batch of each step: a seed, a fault or None, and where it strikes."""
    rng = random.Random(seed)
    faults = ["inf", "nan", "nan loss", "nan loss, finite gradients", "inf loss"]
    made = []
    for _ in range(steps):
        share = 0.35 / micro_batches
        step = []
        for _ in range(micro_batches):
            fault = rng.choice(faults) if rng.random() < share else None
            step.append((rng.randrange(2**30), fault, rng.randrange(4)))
        made.append(step)
    return made


def micro_batch(model, scaler, seed, fault, which, key=None):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    loss = model(x)
    if fault == "nan loss":
        loss = loss * math.nan
    elif fault == "inf loss":
        loss = loss + math.inf
    elif fault == "nan loss, finite gradients":
        loss = loss + math.nan
    scaler.scale(loss, key=key).backward()
    if fault in ("inf", "nan"):
        p = [*model.below.parameters(), *model.above.parameters()][which]
        p.grad.view(-1)[-1] = float(fault)


def outcome(scaler, model):
    """All that a user can see, exact; the norm apart."""
    result = scaler.result
    return {
        "stepped": result.stepped,
        "cause": result.cause,
        "scale of the step": result.scale,
        "culprits": [(str(c), c.kind) for c in result.culprits],
        "micro_batch": result.micro_batch,
        "retries": result.retries,
        "notes": result.notes,
        "scale": scaler.get_scale(),
        "skipped": scaler.skipped_steps,
        "in a row": scaler.consecutive_skips,
        "growth tracker": scaler._get_growth_tracker(),
        "state": {k: v for k, v in scaler.state_dict()["gradlift"].items() if k != "events"},
    }


def scaler_for(path, model, **settings):
    scaler = GradScaler("cpu", names=model, **settings)
    scaler._force_device_path = path == "device"
    return scaler


def optimizer_for(name, fused, params):
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(params, lr=0.05, fused=fused, **momentum)


def run(path, rule, optimizer, fused, steps, *, max_norm=None, **settings):
    model = Net()
    scaler = scaler_for(path, model, rule=rule, **settings)
    optimizer = optimizer_for(optimizer, fused, model.parameters())
    rows = []
    for step in steps:
        optimizer.zero_grad()
        for given in step:
            micro_batch(model, scaler, *given)
        grads = [
            p.grad.double() / scaler.get_scale() for p in model.parameters() if p.grad is not None
        ]
        exact = math.sqrt(math.fsum(g.square().sum().item() for g in grads))
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        if max_norm is not None and scaler.result.stepped:
            # Each against its own gradients: the two paths' weights drift apart by last bits.
            assert scaler.result.grad_norm == pytest.approx(exact, rel=2**-22)
        weights = [p.detach().clone() for p in model.parameters()]
        rows.append((outcome(scaler, model), scaler.result.grad_norm, weights))
    return rows


def same(left, right, *, exact):
    for i, ((said, _, weights), (said_, _, weights_)) in enumerate(zip(left, right, strict=True)):
        assert said == said_, f"step {i}"
        for a, b in zip(weights, weights_, strict=True):
            # 1e-6: clipping puts the norm's last bit into the weights; 3e-7 after 40 steps
            close = bits(a) == bits(b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
            assert close, f"step {i}"


def without_first_fault(steps):
    # torch: a fused SGD whose first step is skipped leaves its momentum uninitialised
    return [[(seed, None, which) for seed, _, which in steps[0]], *steps[1:]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_both_paths_agree(rule, name, fused, micro_batches, max_norm):
    steps = plan(1, 40, micro_batches)
    if (name, fused) == ("SGD", True):
        steps = without_first_fault(steps)
    given = rule, name, fused, steps
    runs = [run(path, *given, max_norm=max_norm) for path in ("numbers", "device")]
    # clipping takes the norm into the weights, so they may differ in their last bits
    same(*runs, exact=max_norm is None)
    causes = {row[0]["cause"] for row in runs[0]}
    assert {Cause.NONE, Cause.OVERFLOW, Cause.LOSS_NONFINITE} <= causes
    assert len({row[0]["scale"] for row in runs[0]}) > 2
    if micro_batches > 1:
        assert len({row[0]["micro_batch"] for row in runs[0]} - {None}) > 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fault", ["inf", "nan loss", "nan loss, finite gradients"])
def test_both_paths_agree_on_the_norm_of_a_skipped_step(fused, fault):
    steps = [[(0, fault, 1)]]
    runs = [run(path, None, "AdamW", fused, steps, max_norm=1.0) for path in ("numbers", "device")]
    norms = [rows[0][1] for rows in runs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("fused", [False, True])
def test_both_paths_agree_at_the_floor(fused):
    rule = "dynamic:growth_interval=2,init_scale=4,min_scale=2"
    faults = ["inf", "inf", "nan", None, None, "inf", "nan loss", "inf", "inf", None, None, None]
    steps = [[(seed, fault, seed % 4)] for seed, fault in enumerate(faults)]
    runs = [run(path, rule, "AdamW", fused, steps) for path in ("numbers", "device")]
    same(*runs, exact=True)
    assert Cause.FLOOR in {row[0]["cause"] for row in runs[0]}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skip", ["each", "all"])
def test_both_paths_agree_on_two_optimizers(fused, skip):
    runs = []
    for path in ("numbers", "device"):
        model, rows = Net(), []
        scaler = scaler_for(path, model, growth_interval=3, skip=skip)
        optimizers = [
            optimizer_for("AdamW", fused, part.parameters()) for part in (model.below, model.above)
        ]
        for i, step in enumerate(plan(3, 40, 1)):
            model.zero_grad()
            micro_batch(model, scaler, *step[0])
            if i % 5 == 2:
                for p in model.above.parameters():
                    p.grad = None  # the second one has nothing to do
            elif i % 5 == 3:
                for p in model.below.parameters():
                    p.grad = None  # the first one
            results = []
            for optimizer in optimizers:
                scaler.step(optimizer)
                results.append(
                    (scaler.result.stepped, scaler.result.cause) if skip == "each" else 0
                )
            scaler.update()
            weights = [p.detach().clone() for p in model.parameters()]
            rows.append(({**outcome(scaler, model), "each": results}, 0.0, weights))
        runs.append(rows)
    same(*runs, exact=True)
    assert runs[0][-1][0]["skipped"] > 3


@pytest.mark.parametrize("fused", [False, True])
def test_both_paths_agree_on_a_loss_for_each_optimizer(fused):
    """scale, step, scale, step, update: the second loss alone is NaN."""
    runs = []
    for path in ("numbers", "device"):
        first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        scaler = scaler_for(path, Net())
        rows = []
        for bad in (1.0, math.nan, 1.0):
            for p, factor in ((first, 1.0), (second, bad)):
                p.grad = None
                optimizer = torch.optim.SGD([p], lr=0.5, fused=fused)
                scaler.scale((p * factor).sum()).backward()
                scaler.step(optimizer)
                rows.append((scaler.result.stepped, scaler.result.cause, bits(p)))
            scaler.update()
            rows.append((scaler.get_scale(), scaler.skipped_steps))
        runs.append(rows)
    assert runs[0] == runs[1]
    assert runs[0][-1] == (2.0**16, 1)  # no scale is to blame


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["clip_grad_norm_", "step"])
def test_both_paths_agree_on_clipping_after_unscale(rule, fused, how):
    runs = []
    for path in ("numbers", "device"):
        model = Net()
        scaler = scaler_for(path, model, rule=rule)
        optimizer = optimizer_for("SGD", fused, model.parameters())
        micro_batch(model, scaler, 0, None, 0)
        scaler.unscale_(optimizer)
        if how == "step":
            scaler.step(optimizer, max_norm=0.01)
            norm = scaler.result.grad_norm
        else:
            norm = scaler.clip_grad_norm_(optimizer, 0.01).item()
            scaler.step(optimizer)
        scaler.update()
        total = math.hypot(
            *(p.grad.norm().item() for p in model.parameters() if p.grad is not None)
        )
        runs.append((norm, total, scaler.result.stepped))
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert runs[0][0] > 0.01
    assert runs[0][1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("exponent", [-20, 16, 60])
def test_both_paths_clip_at_any_scale(fused, exponent):
    """Squares of scaled gradients leave float32 long before the gradients do."""
    runs = []
    for path in ("numbers", "device"):
        model = Net()
        scaler = scaler_for(path, model, init_scale=2.0**exponent)
        optimizer = optimizer_for("SGD", fused, model.parameters())
        micro_batch(model, scaler, 0, None, 0)
        scaler.step(optimizer, max_norm=0.01)
        total = math.hypot(
            *(p.grad.norm().item() for p in model.parameters() if p.grad is not None)
        )
        runs.append((scaler.result.stepped, scaler.result.grad_norm, total))
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert runs[0][2] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_that_leaves_float32_is_not_clipped_by(fused):
    """On a device the squares are float32: at 2^90 the norm is lost, and so is the step."""
    model = Net()
    scaler = scaler_for("device", model, init_scale=2.0**90)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizer_for("SGD", fused, model.parameters())
    micro_batch(model, scaler, 0, None, 0)
    scaler.step(optimizer, max_norm=0.01)
    scaler.update()
    assert not scaler.result.stepped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert scaler.get_scale() == 2.0**89


@pytest.mark.parametrize("fused", [False, True])
def test_both_paths_agree_on_retries(fused):
    runs = []
    for path in ("numbers", "device"):
        model, rows = Net(), []
        scaler = scaler_for(path, model, growth_interval=2, init_scale=2.0**126)
        optimizer = optimizer_for("AdamW", fused, model.parameters())
        closure = functools.partial(lambda model: model(torch.ones(3, 5)) * 1e4, model)
        for retries in (0, 1, 20, 20, 20):
            scaler.train_step(closure, optimizer, retries=retries, model=False)
            rows.append((outcome(scaler, model), [bits(p) for p in model.parameters()]))
            rows.append([(e.what, e.step, e.detail) for e in scaler.events if e.what == "retry"])
        runs.append(rows)
    assert runs[0] == runs[1]
    assert {row[0]["stepped"] for row in runs[0][::2]} == {True, False}


def test_both_paths_agree_on_gradients_without_elements():
    for path in ("numbers", "device"):
        p = torch.nn.Parameter(torch.zeros(0, 3))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = scaler_for(path, Net())
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.result.stepped


def test_both_paths_name_culprits_beside_sparse_gradients_without_values():
    for path in ("numbers", "device"):
        table, p = torch.nn.Embedding(9, 4, sparse=True), torch.nn.Parameter(torch.ones(2))
        scaler = GradScaler("cpu", names={"table": table.weight, "p": p})
        scaler._force_device_path = path == "device"
        optimizer = torch.optim.SGD([table.weight, p], lr=1.0)
        nothing = torch.empty(0, dtype=torch.long)
        scaler.scale(table(nothing).sum() + (p * 2).sum()).backward()
        p.grad[1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert [(str(c), c.kind) for c in scaler.result.culprits] == [("p", "inf")]


def test_a_refused_first_step_leaves_no_momentum_behind():
    """A fused SGD makes its buffers in the first step, and does not fill them if told to skip."""
    runs = []
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN then
    try:
        for path in ("numbers", "device"):
            p = torch.nn.Parameter(torch.ones(3))
            optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9, fused=True)
            scaler = scaler_for(path, Net())
            for bad in (True, False, False):
                optimizer.zero_grad()
                scaler.scale(p.square().sum()).backward()
                if bad:
                    p.grad[0] = math.inf
                scaler.step(optimizer)
                scaler.update()
            runs.append(bits(p))
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0] == runs[1]


def test_a_window_that_moves_to_the_device():
    """The first loss lies on the CPU, the second where the parameters are."""
    model = Net()
    scaler = scaler_for("numbers", model)
    optimizer = optimizer_for("AdamW", True, model.parameters())
    micro_batch(model, scaler, 0, "nan loss", 0)
    scaler._force_device_path = True
    micro_batch(model, scaler, 1, None, 0)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.result.cause, scaler.result.micro_batch) == (Cause.LOSS_NONFINITE, 0)
    assert scaler.skipped_steps == 1


def test_state_is_saved_and_loaded_across_paths():
    steps = plan(5, 20, 1)
    whole = run("numbers", None, "AdamW", True, steps, growth_interval=3)
    for first, second in (("numbers", "device"), ("device", "numbers"), ("device", "device")):
        model, rows = Net(), []
        optimizer = optimizer_for("AdamW", True, model.parameters())
        scaler = scaler_for(first, model, growth_interval=3)
        for i, step in enumerate(steps):
            if i == 10:
                saved = scaler.state_dict()
                scaler = scaler_for(second, model)
                if i % 2 == 0:  # one that has moved already
                    scaler.scale(torch.ones(()))
                    scaler.update(8.0)
                scaler.load_state_dict(saved)
            optimizer.zero_grad()
            micro_batch(model, scaler, *step[0])
            scaler.step(optimizer)
            scaler.update()
            weights = [p.detach().clone() for p in model.parameters()]
            rows.append((outcome(scaler, model), 0.0, weights))
        same(whole, rows, exact=True)


# (b) Nothing waits for the device


class DeviceRead(AssertionError):
    """A value crossed between host and device, and somebody waited for it."""


class Watch(TorchDispatchMode):
    """Bans transfers, counts ops, and remembers float64 on the device."""

    READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2"}

    def __init__(self, home=META, *, transfers=False):
        super().__init__()
        self.home, self.transfers = home, transfers
        self.ops, self.wide = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not self.transfers:
            self.ban(func, name, args, kwargs)
        out = func(*args, **kwargs)
        if name != "device":  # fake tensors are asked where they are
            self.ops.append(name)
        for x in tree_leaves(out):
            here = isinstance(x, torch.Tensor) and x.device.type == self.home
            if here and x.dtype is torch.float64:
                self.wide.append(str(func))
        return out

    def ban(self, func, name, args, kwargs):
        if name in self.READS:
            held = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if any(x.device.type == self.home for x in held):
                raise DeviceRead(f"{func} reads from the device")
        if name in ("_to_copy", "copy_", "copy"):
            source = args[0] if name == "_to_copy" else args[1]
            target = kwargs.get("device") or args[0].device
            kinds = source.device.type, torch.device(target).type
            if kinds[0] != kinds[1]:  # to the device: pageable memory, so this waits as well
                raise DeviceRead(f"{func} copies from {kinds[0]} to {kinds[1]}")


class Fused(torch.optim.Optimizer):
    """The contract of fused optimizers; torch's own do not take meta tensors."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.told = []

    @torch.no_grad()
    def step(self, closure=None):
        self.told.append((self.grad_scale, self.found_inf))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moved = p - p.grad / self.grad_scale * group["lr"]
                    p.copy_(torch.where(self.found_inf > 0, p, moved))


class Idle(Fused):
    """No ops of its own, so that the scaler's are counted alone."""

    def step(self, closure=None):
        self.told.append((self.grad_scale, self.found_inf))


def meta_params(n=4, dtype=torch.float32):
    return [
        torch.nn.Parameter(torch.ones(3, i % 3 + 1, device=META, dtype=dtype)) for i in range(n)
    ]


def backward(scaler, params, loss_dtype=torch.float32):
    loss = sum(p.square().sum() for p in params)
    scaled = scaler.scale(loss.to(loss_dtype))
    assert scaled.device.type == META
    scaled.backward()


@pytest.mark.parametrize("rule", [None, *RULES, "fairseq:tolerance=0.2"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_is_read_from_the_device(rule, max_norm, micro_batches):
    params = meta_params()
    optimizer, scaler = Fused(params), GradScaler("cpu", rule=rule)
    with Watch() as watch:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                backward(scaler, params)
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
    assert len(optimizer.told) == 3
    for grad_scale, found_inf in optimizer.told:
        assert grad_scale.device.type == found_inf.device.type == META
        assert grad_scale.dtype is found_inf.dtype is torch.float32
    assert "where" in watch.ops  # it was watching
    assert watch.wide == []


@pytest.mark.parametrize("order", ["unscale_ first", "clip first", "bfloat16 loss", "half loss"])
def test_nothing_is_read_from_the_device_on_the_long_way(order):
    params = meta_params()
    optimizer, scaler = Fused(params), GradScaler("cpu")
    dtype = {"bfloat16 loss": torch.bfloat16, "half loss": torch.float16}.get(order)
    with Watch() as watch:
        for _ in range(3):
            optimizer.zero_grad()
            backward(scaler, params, dtype or torch.float32)
            if order == "unscale_ first":
                scaler.unscale_(optimizer)
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            assert norm.device.type == META
            scaler.step(optimizer)
            scaler.update()
    assert watch.wide == []


def test_two_optimizers_read_nothing():
    params = meta_params(6)
    optimizers, scaler = [Fused(params[:3]), Fused(params[3:])], GradScaler("cpu")
    with Watch():
        for _ in range(3):
            for p in params:
                p.grad = None
            backward(scaler, params)
            for optimizer in optimizers:
                scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    assert [len(o.told) for o in optimizers] == [3, 3]


class OneDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        held = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device for x in held if x.device.type != "cpu"}
        copies = func.overloadpacket.__name__ in ("_to_copy", "copy_")
        assert copies or len(devices) < 2, f"{func} mixes {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["fused", "unscale_"])
def test_parameters_on_two_devices(how):
    """Fake CUDA tensors, as far as they go here: no op but a copy may mix two devices."""
    with FakeTensorMode(), OneDevice():
        params = [
            torch.nn.Parameter(torch.ones(3, device=d)) for d in ("cuda:0", "cuda:1", "cuda:0")
        ]
        optimizer, scaler = Idle(params), GradScaler("cpu")
        scaler.scale(torch.ones((), device="cuda:0"))
        for p in params:
            p.grad = torch.ones_like(p.data)
        if how == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer, max_norm=1.0)
        assert [p.grad.device for p in params] == [p.device for p in params]
        assert len(optimizer.told) == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: torch.zeros(()).copy_(x),
        lambda x: x.copy_(torch.zeros(())),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_watch_finds_a_read(read):
    x = torch.ones((), device=META)
    with Watch(), pytest.raises(DeviceRead):
        read(x)


def test_the_watch_finds_what_an_unfused_optimizer_needs():
    """One read a step is the price of an optimizer that cannot skip by itself."""

    class Unfused(Fused):
        _step_supports_amp_scaling = False

    params = meta_params()
    optimizer, scaler = Unfused(params), GradScaler("cpu")
    with Watch():
        backward(scaler, params)
        with pytest.raises(DeviceRead):
            scaler.step(optimizer)


REAL_BACKWARD = """
import sys
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("pretend")
sys.path.insert(0, sys.argv[1])
from test_device import RULES, FakeTensorMode, GradScaler, Watch
for name, rule in [("Adam", None), *(("AdamW", rule) for rule in [None, *RULES])]:
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.ones(4, 3, device="pretend"))
        bias = torch.nn.Parameter(torch.ones(3, device="pretend"))
        optimizer = getattr(torch.optim, name)([weight, bias], lr=0.1, fused=True)
        scaler = GradScaler("cpu", rule=rule)
        with Watch("pretend") as watch:
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(2):
                    x = torch.ones(2, 4, device="pretend")
                    scaler.scale((x @ weight + bias).square().mean()).backward()
                scaler.step(optimizer, max_norm=1.0)
                scaler.update()
        fused = [op for op in watch.ops if op.startswith("_fused_adam")]
        assert len(fused) == 3, watch.ops
        assert watch.wide == [], watch.wide
print("no transfer")
"""


def test_nothing_is_read_with_torchs_backward_and_fused_optimizers(pytestconfig):
    """On a pretended device, which has autograd; registering one cannot be undone, so elsewhere."""
    here = str(pytestconfig.rootpath / "tests" / "torch")
    done = subprocess.run(
        [sys.executable, "-c", REAL_BACKWARD, here],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "no transfer", done.stderr[-3000:]


# (c) Few ops


def ops_of(steps, n=4, *, rule=None, max_norm=None, dtype=torch.float32):
    """The ops of scale + step + update, for each step."""
    counts = []
    params = meta_params(n, dtype)
    optimizer, scaler = Idle(params), GradScaler("cpu", rule=rule)
    for _ in range(steps):
        loss = torch.ones((), device=META)
        for p in params:
            p.grad = torch.ones_like(p)
        with Watch() as watch:
            scaler.scale(loss)
            scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
        counts.append(watch.ops)
    return counts


@pytest.mark.parametrize(("max_norm", "most"), [(None, 48), (1.0, 60)])
def test_the_default_rule_takes_few_ops(max_norm, most):
    counts = ops_of(5, max_norm=max_norm)
    assert len(counts[1]) <= most, counts[1]
    assert counts[1] == counts[2] == counts[3] == counts[4]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_ops_do_not_grow_with_tensors(max_norm):
    few, many = (len(ops_of(3, n, max_norm=max_norm)[-1]) for n in (2, 200))
    assert few == many
    few, many = (len(ops_of(3, n, max_norm=max_norm, dtype=torch.bfloat16)[-1]) for n in (2, 200))
    assert many - few <= 198  # a cast a tensor


# (d) The state stays where it is


def test_state_tensors_are_persistent():
    model = Net()
    scaler = scaler_for("device", model, growth_interval=2)
    optimizer = optimizer_for("AdamW", True, model.parameters())
    held = []

    def where():
        home = scaler._scales[None].home
        tensors = [*home.state, home._skipped]
        held.append(tensors)
        return [(id(x), x.data_ptr()) for x in tensors]

    scales, places = [], []
    for i, step in enumerate(plan(6, 24, 1)):
        optimizer.zero_grad()
        micro_batch(model, scaler, *step[0])
        scaler.step(optimizer, max_norm=1.0 if i % 2 else None)
        if i == 10:
            scaler.update(32.0)
        else:
            scaler.update()
        if i == 15:
            scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
            scaler.set_growth_interval(3)
        if i == 20:
            scaler.scale(torch.ones((), dtype=torch.float16))  # caps the scale
        scales.append(scaler.get_scale())
        places.append(where())
        assert scaler._get_scale_async() is scaler._scales[None].home.state.scale
    assert all(place == places[0] for place in places)
    assert len(set(places[0])) == 8  # seven scalars and a count, none of them shared
    assert len(set(scales)) > 3
    assert scales[10] == 32.0


# (e) No float64, which MPS does not have


@pytest.mark.parametrize("rule", [None, *RULES, "mxnet", "metaseq"])
def test_no_float64_on_the_device(rule):
    params = meta_params()
    with Watch(transfers=True) as watch:
        optimizer, scaler = Fused(params), GradScaler("cpu", rule=rule)
        for i in range(3):
            optimizer.zero_grad()
            backward(scaler, params)
            backward(scaler, params)
            if i:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert watch.wide == []


@pytest.mark.filterwarnings("ignore:.*not a power of two")
def test_no_float64_with_odd_factors():
    params = meta_params()
    optimizer, scaler = Fused(params), GradScaler("cpu", 1000.0, 1.7, 0.3, 2)
    with Watch() as watch:
        for _ in range(3):
            optimizer.zero_grad()
            backward(scaler, params)
            scaler.step(optimizer)
            scaler.update()
    assert watch.wide == []


def test_the_watch_finds_float64():
    with Watch() as watch:
        torch.ones((), device=META).double()
    assert watch.wide


@pytest.mark.parametrize(
    ("fused", "listening", "transfers"), [(True, False, 0), (False, False, 1), (True, True, 1)]
)
def test_one_transfer_a_step_at_the_most(fused, listening, transfers, monkeypatch):
    """Nobody listens: none with a fused optimizer, one read without. Somebody does: one copy."""
    packed, count = Transfer._packed, []
    monkeypatch.setattr(Transfer, "_packed", lambda self: count.append(1) or packed(self))
    heard = []
    scaler = GradScaler("cpu", on_event=heard.append if listening else None)
    scaler._force_device_path = True
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([w], fused=fused)
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale((w * (math.inf if i == 3 else 1.0)).sum() * 1.0).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        assert len(count) == transfers * (i + 1)
    assert len(heard) == listening
