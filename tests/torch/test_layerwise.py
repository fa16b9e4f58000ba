"""Lifts change no bit of a float32 run, whatever the network; in float16 they save what is lost."""

import copy
import dataclasses
import json
import math
import pickle
import warnings

import pytest
import torch
from helpers.ranks import run
from helpers.torch import bits
from layerwise_nets import SOUND, WIDTH, WRONG, Chain, Residual, linear
from torch import nn

from gradlift import Journal, read_journal, report
from gradlift.errors import MisuseError, SettingsError, StateError
from gradlift.reading import NAN, Reading
from gradlift.rules import parse
from gradlift.torch import GradScaler, layerwise, probe
from gradlift.torch.lifting import lifts as _lifts
from gradlift.torch.lifting.lifts import BlockLift, BlockPeaks, learn, tracker

every_net = pytest.mark.parametrize("net", SOUND)


@pytest.fixture(autouse=True)
def strict():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*use_reentrant.*|.*requires_grad=True.*")
        yield
    torch.set_num_threads(threads)


def set_lifts(lifted, lifts):
    state = lifted.state_dict()
    for entry, lift in zip(state["blocks"].values(), lifts):
        entry["lift"] = lift
    lifted.load_state_dict(state)


def total(out):
    if isinstance(out, torch.Tensor):
        return out.square().mean()
    return sum(total(v) for v in (out.values() if isinstance(out, dict) else out))


def batches(n, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(6, WIDTH, generator=draw) for _ in range(n)]


def trained(net, prepare=None, steps=4, needs_input_grad=False):
    """Weights, buffers and the inputs' gradients after some steps in float32."""
    torch.manual_seed(0)
    model = net()
    lifted = prepare(model) if prepare else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**6)
    seen = []
    for x in batches(steps):
        x.requires_grad_(needs_input_grad)
        optimizer.zero_grad()
        loss = total(model(x * 1.0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [loss.item(), *([bits(x.grad)] if x.grad is not None else [])]
    held = {k: bits(v) for k, v in model.state_dict().items() if v.dtype is torch.float32}
    return held, seen, torch.rand(1).item(), lifted


# every network, to the bit


@every_net
def test_lifts_change_no_bit_of_float32_training(net):
    def prepare(model):
        lifted = layerwise(model)
        set_lifts(lifted, [2.0**k for k in (3, 0, 11, 6, 1, 20)])
        return lifted

    plain = trained(SOUND[net], needs_input_grad=True)
    ours = trained(SOUND[net], prepare, needs_input_grad=True)
    assert ours[:3] == plain[:3]
    assert max(ours[3].lifts.values()) >= 2.0**11
    assert not ours[3].check_due


@every_net
def test_the_check_leaves_no_trace(net):
    """Random numbers, buffers, gradients, weights: as if it had not been there."""
    plain = trained(SOUND[net])
    assert trained(SOUND[net], layerwise)[:3] == plain[:3]
    assert trained(SOUND[net], lambda m: layerwise(m, check=False))[:3] == plain[:3]


@pytest.mark.parametrize("net", WRONG)
def test_the_check_finds_what_cannot_be_right(net):
    torch.manual_seed(0)
    model = WRONG[net]()
    layerwise(model)
    (x,) = batches(1)
    model.head.weight.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(MisuseError, match=r"blocks\.0"):
        model(x)
    assert all(p.grad is None for n, p in model.named_parameters() if n != "head.weight")
    assert bool((model.head.weight.grad == 1).all())


@pytest.mark.parametrize("net", WRONG)
def test_what_the_check_finds_is_really_wrong(net, monkeypatch):
    """Without any check the gradients are wrong: it does not cry wolf."""
    monkeypatch.setattr("gradlift.torch.lifting.lifting.check_boundaries", lambda loss: None)

    def prepare(model):
        lifted = layerwise(model, check=False)
        set_lifts(lifted, [8.0, 4.0, 16.0, 1.0])
        return lifted

    assert trained(WRONG[net], prepare)[:2] != trained(WRONG[net])[:2]


def test_a_tensor_that_is_kept_for_others_is_refused():
    """The model's output does not depend on it; the training loop's loss may."""

    class Keeps(nn.Linear):
        def forward(self, x):
            self.extra = {"loss": super().forward(x)}
            return self.extra["loss"] * 2

    model = nn.Sequential(linear(), Keeps(WIDTH, WIDTH))
    layerwise(model)
    with pytest.raises(MisuseError, match=r"block '1' keeps a tensor with a gradient in 1\.extra"):
        model(*batches(1))


class Router(nn.Module):
    """Keeps a loss of its own in a list that nobody finds by looking at modules."""

    kept = []

    def __init__(self):
        super().__init__()
        self.gate, self.expert = linear(), linear()

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        Router.kept.append(gate.mean(0).square().sum())
        return self.expert(x) * gate


@dataclasses.dataclass
class Out:
    y: torch.Tensor


class Boxed(nn.Module):
    """Returns an object, so that the first batch's check sees no output."""

    def __init__(self):
        super().__init__()
        self.router, self.head = Router(), linear()

    def forward(self, x):
        return Out(self.head(self.router(x)))


@pytest.mark.parametrize("way", ["list", "hook", "object"])
def test_a_gradient_that_gets_into_a_block_by_a_side_door_is_refused(way):
    """Seen in the graph of the loss, whatever the model returns and whoever kept the tensor."""
    Router.kept.clear()
    model = Boxed() if way == "object" else nn.Sequential(Router(), linear())
    router = model.router if way == "object" else model[0]
    caught = {}
    router.gate.register_forward_hook(lambda m, a, out: caught.update(gate=out))
    layerwise(model, [router])
    scaler = GradScaler("cpu")
    out = model(*batches(1))
    out = out.y if way == "object" else out
    scaler.scale(out.square().mean())  # alone it is fine
    model(*batches(1))
    extra = caught["gate"].square().mean() if way == "hook" else Router.kept[-1]
    with pytest.raises(MisuseError, match=r"made inside block '(0|router)' is used outside of it"):
        scaler.scale(out.square().mean() + extra)


def test_a_batch_that_cannot_be_run_twice_is_warned_of_and_trained_on():
    class Once(Chain):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("only once")
            return super().forward(x)

    model = Once()
    layerwise(model)
    with pytest.warns(UserWarning, match="only once.*not checked"):
        out = model(*batches(1))
    out.sum().backward()
    assert model.head.weight.grad is not None


def test_noise_between_two_plain_runs_is_allowed_for_and_chaos_is_reported():
    """Numbers that no replay puts back: a generator of the model's own."""

    class Noisy(Chain):
        size = 1e-7

        def forward(self, x):
            self.draw = getattr(self, "draw", None) or torch.Generator().manual_seed(0)
            return super().forward(x) * (1 + self.size * torch.rand(1, generator=self.draw))

    model = Noisy()
    layerwise(model)
    model(*batches(1))
    wild = Noisy()
    wild.size = 5.0
    layerwise(wild)
    with pytest.warns(UserWarning, match="two plain runs"):
        wild(*batches(1))


def test_a_model_with_an_autocast_of_its_own_is_checked_with_room_for_float16():
    class Own(Chain):
        def forward(self, x):
            with torch.autocast("cpu", torch.float16):
                return super().forward(x).float()

    layerwise(model := Own())
    model(*batches(1))


def test_inputs_are_not_written_to_by_the_check():
    class Writes(Chain):
        def forward(self, x):
            return super().forward(x.add_(1))

    model = Writes()
    layerwise(model)
    x = torch.zeros(2, WIDTH)
    model(x)
    assert bool((x == 1).all())


# what else is seen from outside


def test_gradients_at_a_block_s_output_can_be_taken_and_hooked():
    torch.manual_seed(0)
    net, (x,) = Chain(), batches(1)

    def gradients(prepare):
        model = copy.deepcopy(net).eval()
        if prepare:
            set_lifts(layerwise(model), [4.0, 32.0, 2.0, 16.0])
        seen = []
        a = model.blocks[0](x)
        a.register_hook(lambda g: seen.append(bits(g)))
        b = model.blocks[1](a)
        b.retain_grad()
        out = model.head(model.blocks[2](b)).sum()
        (taken,) = torch.autograd.grad(out, a, retain_graph=True)
        out.backward()
        return seen, bits(taken), bits(b.grad)

    assert gradients(True) == gradients(False)


def test_gradients_of_gradients_are_refused():
    model = Chain().eval()
    layerwise(model, check=False)
    x = batches(1)[0].requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_where_nothing_is_recorded_nothing_is_done():
    model, (x,) = Chain().eval(), batches(1)
    plain = copy.deepcopy(model)
    lifted = layerwise(model)
    set_lifts(lifted, [4.0, 2.0, 8.0, 1.0])
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        ours, theirs = model(x), plain(x)
    assert ours.dtype is theirs.dtype is torch.float16
    assert torch.equal(ours, theirs)
    assert lifted.passes == 0
    assert lifted.check_due


def test_a_float16_output_is_float32_outside_and_float16_again_in_the_next_block():
    class Tells(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.got = linear(), []

        def forward(self, x):
            self.got.append((x.dtype, x.detach().float().clone()))
            return self.a(x)

    model = nn.Sequential(linear(), Tells())
    layerwise(model, check=False)
    (x,) = batches(1)
    with torch.autocast("cpu", torch.float16):
        y = model[0](x)
        assert y.dtype is torch.float32
        model[1](y)
        y.add_(2.0**-14)  # no float16 any more
        model[1](y)
        model[1](model[0](x) + 0)
    kinds = [kind for kind, _ in model[1].got]
    assert kinds == [torch.float16, torch.float32, torch.float32]
    assert torch.equal(model[1].got[1][1], y)


def test_a_block_that_writes_to_a_float16_input_writes_to_the_float32_one_outside():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), nn.Sequential(nn.ReLU(inplace=True), linear())

        def forward(self, x):
            y = self.a(x)
            return self.b(y) + y, y

    torch.manual_seed(0)
    model, (x,) = First(), batches(1)

    def gradients(half):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            out, y = model(x)
        assert (y >= 0).all()
        out.float().square().mean().backward()
        return [p.grad.double() for p in model.parameters()]

    true = gradients(False)
    set_lifts(layerwise(model, ["a", "b"]), [8.0, 64.0])
    assert max(errors(gradients(True), true)) < 2.0**-6


def test_an_exception_inside_a_block_leaves_the_weights_in_place():
    class Fails(nn.Linear):
        def forward(self, x):
            assert not isinstance(self.weight, nn.Parameter)
            raise KeyError("inside")

    model = nn.Sequential(linear(), Fails(WIDTH, WIDTH))
    mine = list(model.parameters())
    set_lifts(layerwise(model, check=False), [2.0, 4.0])
    with pytest.raises(KeyError, match="inside"):
        model(*batches(1))
    assert [id(p) for p in model.parameters()] == [id(p) for p in mine]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    model[1] = linear()
    model(*batches(1)).sum().backward()  # and no block is thought to be under way


def test_a_copy_or_a_pickle_has_no_lifts_and_remove_ends_them():
    model, (x,) = Chain().eval(), batches(1)
    lifted = layerwise(model)
    set_lifts(lifted, [2.0, 2.0, 2.0, 2.0])
    want = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        passes = lifted.passes
        assert torch.equal(other(x), want)
        assert lifted.passes == passes
        other.blocks[0][0].weight.data.zero_()
        assert not torch.equal(other(x), want)  # its own weights
        set_lifts(layerwise(other), [2.0, 2.0, 2.0, 2.0])
    with pytest.raises(MisuseError, match="lifted already"):
        layerwise(model)
    lifted.remove()
    assert all("forward" not in vars(m) for m in model.modules())
    layerwise(model).remove()


# choosing blocks


def test_blocks_by_name_by_pattern_by_module_and_by_default():
    def names(*blocks):
        model = Residual()
        found = [model.blocks[0] if b is None else b for b in blocks]
        return list(layerwise(model, found or None).lifts)

    layers = ["blocks.0", "blocks.1", "blocks.2"]
    assert names() == [*layers, "head"]
    assert names("head") == ["head"]
    assert names("blocks.*") == layers
    assert names("head", None) == ["blocks.0", "head"]
    assert names("blocks.*.0") == [f"{layer}.0" for layer in layers]
    assert list(layerwise(linear()).lifts) == [""]


def test_what_cannot_work_is_refused_with_its_reason():
    model = Residual()
    with pytest.raises(SettingsError, match=r"block 'blocks\.0\.0' lies inside block 'blocks\.0'"):
        layerwise(model, ["blocks.*", model.blocks[0][0]])
    with pytest.raises(SettingsError, match=r"no module 'block'; it has blocks, blocks\.0"):
        layerwise(model, ["block"])
    with pytest.raises(SettingsError, match="no module a Linear"):
        layerwise(model, [linear()])
    with pytest.raises(SettingsError, match="list of modules or names"):
        layerwise(model, "head")
    with pytest.raises(SettingsError, match="empty"):
        layerwise(model, [])
    with pytest.raises(SettingsError, match="every is 0"):
        layerwise(model, every=0)
    with pytest.raises(SettingsError, match="follows magnitudes"):
        layerwise(model, rule="dynamic")
    with pytest.raises(MisuseError, match=r"head\.weight is a float16 parameter.*torch\.autocast"):
        half = Residual()
        half.head.half()
        layerwise(half)
    with pytest.raises(MisuseError, match="no shape yet"):
        layerwise(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(MisuseError, match="DistributedDataParallel"):
        layerwise(nn.DataParallel(model))
    assert all("forward" not in vars(m) for m in model.modules())


def test_weights_that_become_float16_later_are_refused_too():
    model = nn.Sequential(linear())
    set_lifts(layerwise(model, check=False), [2.0])
    model.half()
    with pytest.raises(MisuseError, match="float16 parameter"):
        model(batches(1)[0].half())


# float16: what it is for


class Steep(nn.Module):
    """Twelve layers; forward is an ordinary tanh net, backward loses six binades a layer."""

    gap = 2.0**-6

    def __init__(self, layers=12, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x.detach() * (1 - self.gap) + x * self.gap
        return x


class Heads(nn.Module):
    """One trunk, heads whose losses count from 1 down to 2^-50."""

    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x):
        x = torch.tanh(self.trunk(x))
        return [head(x) for head in self.heads]


def loss_of(model, x, half=True):
    with torch.autocast("cpu", torch.float16, enabled=half):
        out = model(x)
    if isinstance(out, list):
        return sum(o.float().square().mean() * 2.0 ** (-10 * i) for i, o in enumerate(out))
    return out.float().square().mean()


def gradients(model, x, scale=1.0, half=True):
    for p in model.parameters():
        p.grad = None
    (loss_of(model, x, half) * scale).backward()
    return [p.grad.double() / scale for p in model.parameters()]


def errors(got, want):
    """Relative, of each parameter; inf if it is not finite."""
    each = [((g - w).norm() / w.norm()).item() for g, w in zip(got, want)]
    return [e if math.isfinite(e) else math.inf for e in each]


def wide(model):
    torch.manual_seed(0)
    return model(), torch.randn(64, 32)


def binades(grads):
    peaks = [g.abs().max().item() for g in grads]
    return math.log2(max(peaks) / min(peaks))


@pytest.mark.parametrize("start", [0, 16, 32])
@pytest.mark.parametrize("net", [Steep, Heads])
def test_a_net_that_no_single_scale_serves(net, start):
    model, x = wide(net)
    true = gradients(model, x, half=False)
    assert binades(true) > 40
    for k in range(0, 60, 2):
        assert max(errors(gradients(model, x, 2.0**k), true)) > 0.5

    lifted = layerwise(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", rule=f"auto:init_scale=2^{start}")
    stepped = []
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(scaler.result.stepped)
    assert lifted.settled
    assert stepped == sorted(stepped)  # what 2^32 cost, the scaler's own rule has lost
    assert all(stepped if start < 32 else stepped[4:])
    assert max(errors(gradients(model, x, scaler.get_scale()), true)) < 2.0**-8
    assert min(lifted.lifts.values()) == 1
    assert max(lifted.lifts.values()) > 2.0**40


def test_train_step_with_retries_loses_no_batch_and_trains_as_float32_does():
    """From a start far too high; a spike of 2^12 in a lifted block at step 6."""

    def train(half):
        model, x = wide(Heads)
        if half:
            lifted = layerwise(model, every=4)
        parts = [model.trunk, *model.heads]  # each with the rate it needs to learn anything
        optimizer = torch.optim.SGD([{"params": part.parameters()} for part in parts])
        scaler = GradScaler("cpu", rule="auto:init_scale=2^32" if half else "1")
        results, losses = [], []
        for step in range(60):

            def closure(step=step):
                with torch.autocast("cpu", torch.float16, enabled=half):
                    out = model(x)
                weights = [2.0 ** (-10 * i) for i in range(len(out))]
                weights[4] *= 2.0**12 if step == 6 else 1
                each = [(o.float() - 1).square().mean() for o in out]
                losses.append([e.item() for e in each])
                return sum(e * w for e, w in zip(each, weights))

            for i, group in enumerate(optimizer.param_groups):  # the spike's own step is not ours
                group["lr"] = 0.0 if step == 6 else 0.5 * 2.0 ** (10 * max(0, i - 1))
            results.append(scaler.train_step(closure, optimizer, retries=8, model=model))
        return results, losses[-1], (lifted if half else None)

    results, ours, lifted = train(True)
    assert all(r.stepped for r in results)
    assert results[6].retries > 0
    assert sum(r.retries for r in results[8:]) == 0
    _, theirs, _ = train(False)
    for a, b in zip(ours, theirs):
        assert b < 0.5
        assert a == pytest.approx(b, rel=0.02)
    assert lifted.lifts["heads.5"] > lifted.lifts["heads.3"] >= 2.0**20


def test_accumulation_over_micro_batches_is_the_sum():
    model, x = wide(Steep)
    true = gradients(model, x, half=False)
    lifted = layerwise(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", rule="auto")
    for _ in range(6):
        optimizer.zero_grad()
        for part in x.split(16):
            scaler.scale(loss_of(model, part) / 4).backward()
        scale = scaler.get_scale()
        got = [p.grad.double() / scale for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.result.stepped
    assert lifted.settled
    assert max(errors(got, true)) < 2.0**-8


@pytest.mark.parametrize("net", ["Checkpointed", "Reentrant", "CheckpointedInside"])
def test_checkpointing_in_float16_gives_the_gradients_of_no_checkpointing(net):
    torch.manual_seed(0)
    model = SOUND[net]()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    x = batches(1)[0]

    def loss(half):
        with torch.autocast("cpu", torch.float16, enabled=half):
            out = model(x)
        return out.float().square().mean() * 2.0**-40

    loss(False).backward()
    true = [p.grad.double() for p in model.parameters()]
    lifted = layerwise(model)
    set_lifts(lifted, [2.0**30, 2.0**30, 2.0**30, 2.0**30])
    model.zero_grad()
    loss(True).backward()
    assert max(errors([p.grad.double() for p in model.parameters()], true)) < 2.0**-6


def test_a_block_that_is_never_reached_is_left_alone_and_the_search_ends():
    class Unused(Steep):
        def __init__(self):
            super().__init__(3)
            self.spare = nn.Linear(32, 32)
            self.dead = nn.Linear(32, 32)

        def forward(self, x):
            return super().forward(self.dead(x) * 0.0 + x)

    model, x = wide(Unused)
    lifted = layerwise(model, every=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", rule="auto")
    looked = []
    for _ in range(30):
        scaler.scale(loss_of(model, x)).backward()
        looked.append(lifted.looked)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert lifted.lifts["spare"] == lifted.lifts["dead"] == 1
    assert lifted.lifts["layers.0"] > 1
    assert looked == [i < 16 or i % 5 == 0 for i in range(30)]


def test_an_overflow_is_looked_into_and_lowers_the_lift_of_the_block_that_caused_it():
    model, x = wide(Heads)
    lifted = layerwise(model, every=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", rule="auto")

    def step(spike=1.0):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = sum(o.float().square().mean() * 2.0 ** (-10 * i) for i, o in enumerate(out))
        scaler.scale(loss + out[5].float().square().mean() * 2.0**-50 * spike).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.result.stepped

    assert all(step() for _ in range(4))
    before = lifted.lifts
    passes = []
    while not step(2.0**12):
        passes.append(lifted.again)
    assert passes  # some were lost, and each told it to look again
    assert all(passes)
    assert all(step(2.0**12) for _ in range(4))
    assert before["heads.5"] / lifted.lifts["heads.5"] >= 2.0**10
    assert lifted.lifts["heads.4"] == before["heads.4"]


# what is told


def test_the_peak_is_the_largest_lifted_float16_gradient():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.eye_(model[0].weight)
    nn.init.eye_(model[1].weight)
    lifted = layerwise(model, check=False)
    set_lifts(lifted, [2.0**8, 2.0**3])
    assert lifted.peak() is NAN
    with torch.autocast("cpu", torch.float16):
        out = model(torch.ones(1, 4))
    out.sum().backward()
    assert lifted.peak() == 2.0**8  # ones everywhere, as they flow in the first block
    assert set(lifted.records) == {"1", "0"}
    assert lifted.records["0"].inner == lifted.records["1"].outer == 1.0
    assert bits(model[0].weight.grad) == bits(torch.ones(4, 4))
    lifted.ended(Reading(False, 1.0), 1.0)
    told = lifted.samples()
    assert told["0"]["lift"] == 2.0**8
    assert told["0"]["exponents"] == {8: 4}
    assert told["1"]["exponents"] == {3: 4}
    assert lifted.samples() == {}
    assert lifted.peak() is NAN


def test_a_peak_between_a_block_s_own_layers_is_seen():
    """Backward, 2^10 between two layers; neither at the border, which is float32, nor a weight."""

    class Float(nn.Module):
        def forward(self, x):
            return x.float()

    layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    nn.init.eye_(layers[0].weight)
    layers[1].weight.data = torch.eye(4) * 2.0**10
    model = nn.Sequential(nn.Sequential(*layers, Float()))
    lifted = layerwise(model, [model[0]], check=False)
    with torch.autocast("cpu", torch.float16):
        out = model(torch.full((1, 4), 2.0**-10))
    out.sum().backward()
    assert [p.grad.max().item() for p in model.parameters()] == [1.0, 2.0**-10]
    assert lifted.peak() == 2.0**10
    assert not any(m._forward_hooks for m in model.modules())


class Halved(nn.Linear):
    """float16 without autocast."""

    def forward(self, x):
        return nn.functional.linear(x.half(), self.weight.half(), self.bias.half())


def test_on_a_device_nothing_is_read_before_the_window_ends():
    """Meta tensors have no values: whoever reads one is caught."""
    model = nn.Sequential(Halved(4, 4), Halved(4, 4)).to("meta")
    lifted = layerwise(model, every=2, check=False)
    set_lifts(lifted, [8.0, 2.0])
    lifted.settled = True
    for looked in (True, False):
        model(torch.ones(3, 4, device="meta")).square().sum().backward()
        assert lifted.looked is looked
        peak = lifted.peak()
        assert (peak.device.type, peak.shape) == ("meta", ()) if looked else peak is NAN
        lifted.records, lifted.looked = {}, False
    flag = torch.ones((), device="meta").bool()
    lifted.ended(Reading(flag, torch.ones((), device="meta"), flag), torch.ones((), device="meta"))


def test_peaks_that_stay_on_a_device_give_the_same_lifts(monkeypatch):
    def lifts():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 8), Halved(8, 8), Halved(8, 8))
        model[2].weight.data *= 2.0**-9
        lifted = layerwise(model)
        for _ in range(4):
            with torch.autocast("cpu", torch.float16):
                out = model(torch.arange(60) % 4)  # the first block sums up in float32
            (out.float().square().mean() * 2.0**4).backward()
            told = lifted.peak()
            lifted.ended(Reading(False, 1.0), torch.tensor(2.0**4))
        return lifted.lifts, float(told)

    want = lifts()
    assert max(want[0].values()) >= 2.0**6
    plain = _lifts.peak_of
    monkeypatch.setattr(_lifts, "peak_of", lambda flat: torch.tensor(plain(flat)))
    assert lifts() == want


def test_gradients_that_never_were_float16_do_not_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, WIDTH), linear())
    lifted = layerwise(model)
    x = torch.arange(60) % 4  # sums of 15: float16 could not hold them
    model(x).square().mean().backward()
    assert lifted.looked
    assert lifted.peak() is NAN
    lifted.ended(Reading(False, 1.0), 1.0)
    assert set(lifted.lifts.values()) == {1.0}
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    loss.backward()
    assert lifted.records["0"].outer > 0
    assert lifted.records["0"].inner is NAN
    assert lifted.records["1"].inner > 0


def test_a_non_finite_gradient_is_a_peak_of_inf():
    model = nn.Sequential(linear())
    lifted = layerwise(model, check=False)
    with torch.autocast("cpu", torch.float16):
        loss = model(*batches(1)).float().sum()
    (loss * 2.0**20).backward()
    assert lifted.peak() == math.inf
    assert lifted.covers([model[0].weight])
    assert not lifted.covers([torch.ones(1)])


def test_a_loss_that_was_not_finite_teaches_nothing():
    model = nn.Sequential(linear())
    lifted = layerwise(model, check=False)
    before = lifted.state_dict()["blocks"]
    with torch.autocast("cpu", torch.float16):
        loss = model(*batches(1)).float().sum()
    loss.backward()
    lifted.ended(Reading(True, math.inf, loss_nonfinite=True), 1.0)
    assert lifted.state_dict()["blocks"] == before
    assert lifted.again
    assert not lifted.looked


def test_between_samples_nothing_is_looked_at():
    model = Chain()
    lifted = layerwise(model, every=3, check=False)
    lifted.settled = True
    looked = []
    for x in batches(7):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()
        looked.append(lifted.looked)
        assert bool(lifted.records) == lifted.looked
        lifted.ended(Reading(False, 1.0), 1.0)
        lifted.again = False
    assert looked == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("net", ["Checkpointed", "Reentrant"])
def test_what_is_recomputed_is_no_pass_of_its_own(net):
    model = SOUND[net]()
    lifted = layerwise(model, every=4, check=False)
    for x in batches(3):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()
        assert set(lifted.records) == {"blocks.0", "blocks.1", "blocks.2", "head"}
    assert lifted.passes == 3


def test_a_lift_that_moved_far_is_looked_at_again():
    model, x = wide(Heads)
    lifted = layerwise(model, every=10)
    looked = []
    for step in range(24):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        far = 2.0 ** (8 if step >= 10 else 0)
        loss = out[0].float().square().mean() + far * out[1].float().square().mean() / 2**10
        (loss * 2.0**12).backward()
        looked.append(lifted.looked)
        lifted.ended(Reading(False, 1.0), 2.0**12)
    assert lifted.settled
    assert [i for i, yes in enumerate(looked) if yes and i > 4] == [10, 11, 20]
    assert lifted.lifts["heads.0"] * 4 >= lifted.lifts["heads.1"]


def test_blocks_called_without_the_model_are_passes_too():
    model = Chain()
    lifted = layerwise(model, check=False)
    for _ in range(3):
        x = batches(1)[0]
        for block in model.blocks:
            x = block(x)
        x.sum().backward()
    assert lifted.passes == 2  # the first has no beginning
    model(batches(1)[0]).sum().backward()
    assert lifted.passes == 3


# levels and lifts, by numbers


def levels(**lifts):
    rule = tracker("auto", 1)
    return rule, {name: BlockLift(rule.init(), lift) for name, lift in lifts.items()}


def test_lifts_are_what_makes_the_blocks_alike():
    rule, known = levels(a=1.0, b=1.0)
    assert learn(
        rule, known, {"b": BlockPeaks(2.0**4, 2.0**2), "a": BlockPeaks(2.0**-6, 2.0**-8)}, 1.0, True
    )
    assert [known[n].lift for n in "ab"] == [2.0**10, 1.0]
    again = {"b": BlockPeaks(2.0**4, 2.0**2), "a": BlockPeaks(2.0**-6, 2.0**-8)}
    assert not learn(rule, known, again, 1.0, True)
    assert [known[n].lift for n in "ab"] == [2.0**10, 1.0]


def test_what_was_flushed_is_found_at_the_border_and_what_is_behind_is_guessed():
    """c is clear; b is flushed, but what arrived at it is known; at a nothing arrived."""
    rule, known = levels(a=1.0, b=1.0, c=1.0)
    seen = {"c": BlockPeaks(1.0, 1.0), "b": BlockPeaks(0.0, 2.0**-30), "a": BlockPeaks(0.0, 0.0)}
    assert learn(rule, known, seen, 1.0, True)
    assert [known[n].lift for n in "abc"] == [2.0**14, 2.0**22, 1.0]  # 8 bits of room each
    assert not known["b"].known
    seen = {
        "c": BlockPeaks(1.0, 1.0),
        "b": BlockPeaks(2.0**-28, 2.0**-30),
        "a": BlockPeaks(2.0**-20, 2.0**-22),
    }
    learn(rule, known, seen, 1.0, True)
    assert [known[n].lift for n in "abc"] == [2.0**20, 2.0**28, 1.0]
    rule, known = levels(a=64.0, c=1.0)
    assert not learn(
        rule, known, {"c": BlockPeaks(1.0, 1.0), "a": BlockPeaks(0.0, 0.0)}, 1.0, False
    )
    assert known["a"].lift == 1.0


def test_only_the_first_block_that_overflowed_is_named():
    seen = {
        "c": BlockPeaks(8.0, 8.0),
        "b": BlockPeaks(math.inf, 4.0),
        "a": BlockPeaks(math.inf, math.inf),
    }
    rule, known = levels(a=1.0, b=1.0, c=1.0)
    learn(rule, known, {n: BlockPeaks(8.0, 8.0) for n in "cba"}, 1.0, True)
    before = {n: known[n].state for n in "abc"}
    assert learn(rule, known, seen, 1.0, True)
    assert known["b"].state.scale < before["b"].scale
    assert known["a"].state == before["a"]
    assert known["c"].state.scale == before["c"].scale
    # Of two the first, also where what arrived at the second was finite.
    learn(rule, known, {**seen, "a": BlockPeaks(math.inf, 4.0)}, 1.0, True)
    assert known["a"].state == before["a"]
    # Nothing inside grew: too much arrived, and how much is known.
    rule, known = levels(b=2.0**20)
    learn(rule, known, {"b": BlockPeaks(math.inf, 2.0**3)}, 1.0, True)
    assert known["b"].state.scale * 2.0**3 * 2.0**8 <= 2.0**15


def test_a_lift_has_a_ceiling():
    rule, known = levels(a=1.0, b=1.0)
    learn(
        rule, known, {"b": BlockPeaks(2.0**10, 1.0), "a": BlockPeaks(2.0**-9, 1.0)}, 2.0**-60, True
    )
    learn(rule, known, {"b": BlockPeaks(2.0**10, 1.0)}, 2.0**-60, True)
    assert known["a"].lift == 2.0**19
    known["a"].state = known["a"].state._replace(scale=2.0**126)
    learn(rule, known, {"b": BlockPeaks(2.0**10, 1.0)}, 2.0**-60, True)
    assert known["a"].lift == 2.0**96


def test_a_rule_is_followed_once_in_every_steps_without_bounds():
    rule = tracker("auto:cautious", 50)
    assert rule.leak == 50 * parse("auto:cautious").leak
    assert (rule.min_scale, rule.max_scale) == (2.0**-126, 2.0**126)
    assert rule.margin_bits == parse("auto:cautious").margin_bits


# state


def test_a_resumed_run_goes_on_to_the_bit():
    def begin():
        model, x = wide(Heads)
        lifted = layerwise(model, every=3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return model, lifted, optimizer, GradScaler("cpu", rule="auto"), x

    def go_on(run, steps):
        model, lifted, optimizer, scaler, x = run
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
        return {k: bits(v) for k, v in model.state_dict().items()}, lifted.state_dict()

    through = begin()
    go_on(through, 4)
    saved = pickle.dumps([part.state_dict() for part in through[:4]])
    assert json.loads(json.dumps(through[1].state_dict())) == through[1].state_dict()
    want = go_on(through, 7)
    resumed = begin()
    for part, state in zip(resumed, pickle.loads(saved)):
        part.load_state_dict(state)
    assert max(resumed[1].lifts.values()) > 2.0**30
    assert go_on(resumed, 7) == want


DAMAGE = {
    "no dict": lambda s: [1],
    "schema": lambda s: {**s, "schema": 2},
    "passes": lambda s: {**s, "passes": -1},
    "windows": lambda s: {**s, "windows": True},
    "settled": lambda s: {**s, "settled": 1},
    "again": lambda s: {k: v for k, v in s.items() if k != "again"},
    "blocks": lambda s: {**s, "blocks": None},
    "a block less": lambda s: {**s, "blocks": {"0": s["blocks"]["0"]}},
    "another name": lambda s: {**s, "blocks": {"0": s["blocks"]["0"], "x": s["blocks"]["1"]}},
    "no entry": lambda s: {**s, "blocks": {**s["blocks"], "1": 3}},
    **{
        f"lift {lift!r}": lambda s, lift=lift: {
            **s,
            "blocks": {**s["blocks"], "1": {**s["blocks"]["1"], "lift": lift}},
        }
        for lift in (0.5, 3.0, math.inf, math.nan, 2.0**97, "2", True, None)
    },
    "known": lambda s: {**s, "blocks": {**s["blocks"], "1": {**s["blocks"]["1"], "known": 1}}},
    "level": lambda s: {
        **s,
        "blocks": {
            **s["blocks"],
            "1": {**s["blocks"]["1"], "state": {**s["blocks"]["1"]["state"], "level": 0.5}},
        },
    },
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_state_is_refused_and_changes_nothing(kind):
    lifted = layerwise(nn.Sequential(linear(), linear()))
    set_lifts(lifted, [2.0, 8.0])
    before = lifted.state_dict()
    broken = copy.deepcopy(before)
    broken["blocks"]["0"]["lift"] = 32.0
    with pytest.raises(StateError):
        lifted.load_state_dict(DAMAGE[kind](broken))
    assert lifted.state_dict() == before


# two ranks


def test_two_ranks_of_ddp():
    """Each rank has its own lifts; weights stay equal, and equal to those of DDP without lifts."""
    a, b = run("layerwise_job.py", 2, timeout=240)
    for case in ("plain", "checked", "lifted", "tied"):
        assert a[case] == b[case], case
    assert a["plain"] == a["checked"] == a["lifted"]
    assert a["tied"] == a["tied, plain"] != a["plain"]
    assert a["lifts"] != b["lifts"]
    assert a["half"]["averaged"] == b["half"]["averaged"]
    assert a["half"]["scales"] == b["half"]["scales"]
    for told in (a, b):
        assert all(told["half"]["stepped"][2:])
        assert max(told["half"]["errors"]) < 2.0**-6
        assert max(told["half"]["lifts"]) > 2.0**40


def test_lifts_are_recorded_and_shown_beside_what_a_probe_saw(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    lifted = layerwise(model)
    probe(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = GradScaler("cpu", rule="auto", journal=journal)
        for x in batches(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x * 2.0**-12).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    run = read_journal(tmp_path / "run.jsonl")
    last = [p.modules for p in run.probes if "lift" in p.modules["0"]][-1]
    assert {name: last[name]["lift"] for name in lifted.lifts} == lifted.lifts
    assert len(set(lifted.lifts.values())) == 2
    assert all(0 < last[name]["amax"] <= 65504 for name in lifted.lifts)
    shown = report.text(run)
    assert f"2^{round(math.log2(max(lifted.lifts.values())))}  " in shown
