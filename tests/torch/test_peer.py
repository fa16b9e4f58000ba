"""GradScaler against torch.amp.GradScaler: the same bits, as long as every loss is finite."""

import copy
import json
import math
import pickle
import random
import warnings

import pytest
import torch
from helpers.torch import bits

from gradlift.errors import StateError
from gradlift.torch import GradScaler

STEPS = 24
OPTIMIZERS = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adagrad": {}}
KINDS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_kind = pytest.mark.parametrize("kind", KINDS)
ODD = "ignore:.*not a power of two"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One thread: these tensors are tiny. No search for names: nobody asks for them here."""
    monkeypatch.setattr("gradlift.torch.names.found", dict, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def theirs(**settings):
    return torch.amp.GradScaler("cpu", **{"growth_interval": 3, **settings})


def ours(**settings):
    return GradScaler("cpu", **{"growth_interval": 3, **settings})


def every_bit(model, optimizers):
    """Weights, and whatever the optimizers remember; what is all zeros may not be there yet."""
    held = {name: bits(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for optimizer in optimizers:
            for what, x in optimizer.state.get(p, {}).items():
                if torch.is_tensor(x) and x.count_nonzero():
                    held[name, what] = bits(x)
    return held


class Net(torch.nn.Module):
    """Two layers, and a parameter that never gets a gradient."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.below = torch.nn.Linear(5, 7)
        self.above = torch.nn.Linear(7, 2)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.above(torch.tanh(self.below(x))).square().mean()


def make(name, kind, params, **settings):
    return getattr(torch.optim, name)(
        params, lr=0.05, **{**OPTIMIZERS[name], **KINDS[kind], **settings}
    )


def plan(seed, steps=STEPS, first=0):
    """For each step: a seed for its data, and what is written into which gradient, if anything."""
    rng = random.Random(seed)
    made = []
    for step in range(steps):
        value = rng.choice([math.inf, -math.inf, math.nan]) if rng.random() < 0.25 else None
        where = rng.randrange(4), rng.randrange(2)
        made.append((rng.randrange(2**30), None if step < first else value, *where))
    assert any(value is not None for _, value, *_ in made)
    return made


def steps_of(seed, name, kind):
    # torch: a fused SGD whose first step is skipped leaves its momentum uninitialised
    return plan(seed, first=1 if (name, kind) == ("SGD", "fused") else 0)


def backward(model, scaler, step, micro_batches=1, level=1.0):
    seed, value, which, element = step
    data = torch.Generator().manual_seed(seed)
    for _ in range(micro_batches):
        loss = model(torch.randn(4, 5, generator=data)) * (level / micro_batches)
        scaler.scale(loss).backward()
    if value is not None:
        list(model.parameters())[1:][which].grad.view(-1)[element] = value


def history(
    scaler, model, optimizers, steps, *, by_hand=None, between=None, end=None, **how
):  # -> one row a step
    """Trains; what `between` returns replaces the scaler in mid-run, `end` replaces update()."""
    rows = []
    for i, step in enumerate(steps):
        if between is not None and i == len(steps) // 2:
            scaler = between(scaler)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, scaler, step, **how)
        skipped = []
        for optimizer in optimizers:
            before = [bits(p) for p in model.parameters()]
            if by_hand is not None:
                scaler.unscale_(optimizer)
                params = [p for group in optimizer.param_groups for p in group["params"]]
                norm = torch.nn.utils.clip_grad_norm_(params, by_hand)
                skipped.append(str(norm.item()))
            scaler.step(optimizer)
            skipped.append(before == [bits(p) for p in model.parameters()])
            if isinstance(scaler, GradScaler):
                assert scaler.result.stepped is not skipped[-1]
        if end is None:
            scaler.update()
        else:
            end(scaler, i)
        rows.append(
            (
                scaler.get_scale(),
                scaler._get_growth_tracker(),
                skipped,
                every_bit(model, optimizers),
            )
        )
    return rows


def same(left, right):
    """Row by row, so that a failure names the first step that differs."""
    assert len(left) == len(right)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a[:3] == b[:3], f"step {i}: scale, growth tracker, skips"
        assert a[3] == b[3], f"step {i}: weights or optimizer state"


def scales(rows):
    return [row[0] for row in rows]


@every_optimizer
@every_kind
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("by_hand", [None, 0.5], ids=["", "clipped by hand"])
def test_bits_are_torchs(name, kind, micro_batches, by_hand):
    for seed in range(2):
        runs = []
        for scaler in (theirs(), ours()):
            model = Net(seed)
            optimizer = make(name, kind, model.parameters())
            runs.append(
                history(
                    scaler,
                    model,
                    [optimizer],
                    steps_of(seed, name, kind),
                    micro_batches=micro_batches,
                    by_hand=by_hand,
                )
            )
        same(*runs)
        assert {True, False} <= {row[2][-1] for row in runs[0]}  # steps and skips
        assert max(scales(runs[0])) > min(scales(runs[0]))


@every_kind
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_overflows_of_their_own_accord(name, kind):
    """Nothing is injected: the scale is what makes float32 gradients overflow."""
    runs = []
    for scaler in (theirs(init_scale=2.0**125), ours(init_scale=2.0**125)):
        model = Net()
        momentum = {"momentum": 0.0} if name == "SGD" else {}  # see `steps_of`
        optimizer = make(name, kind, model.parameters(), **momentum)
        steps = [(seed, None, 0, 0) for seed, *_ in plan(0)]
        runs.append(history(scaler, model, [optimizer], steps, level=1e3))
    same(*runs)
    assert {True, False} <= {row[2][-1] for row in runs[0]}


@every_kind
@pytest.mark.parametrize("by_hand", [None, 0.5], ids=["", "clipped by hand"])
def test_two_optimizers(kind, by_hand):
    runs = []
    for scaler in (theirs(), ours()):
        model = Net()
        optimizers = [
            make("Adam", kind, model.below.parameters()),
            make("AdamW", kind, model.above.parameters()),
        ]
        runs.append(history(scaler, model, optimizers, plan(3, 40), by_hand=by_hand))
    same(*runs)
    both = {(row[2][0 if by_hand is None else 1], row[2][-1]) for row in runs[0]}
    assert {(False, False), (True, False), (False, True)} <= both  # each skips by itself


@pytest.mark.filterwarnings(ODD)
@every_kind
def test_factors_that_are_no_powers_of_two(kind):
    odd = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3}
    runs = []
    for scaler in (theirs(**odd), ours(**odd)):
        model = Net()
        optimizer = make("Adam", kind, model.parameters())
        runs.append(history(scaler, model, [optimizer], plan(1)))
    same(*runs)


def test_settings_changed_in_mid_run():
    def change(scaler):
        scaler.set_growth_interval(2)
        scaler.set_growth_factor(8.0)
        scaler.set_backoff_factor(0.125)
        told = (
            scaler.get_growth_interval(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
        )
        assert told == (2, 8.0, 0.125)
        return scaler

    runs = []
    for scaler in (theirs(), ours()):
        model = Net()
        optimizer = make("Adam", "plain", model.parameters())
        runs.append(history(scaler, model, [optimizer], plan(1, 40), between=change))
    same(*runs)


@pytest.mark.parametrize("scale", [2.0**5, 1000.0])
@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_a_scale_set_by_hand(scale, wrap):
    def end(scaler, i):
        scaler.update(*([wrap(scale)] if i % 7 == 4 else []))

    runs = []
    for scaler in (theirs(), ours()):
        model = Net()
        optimizer = make("Adam", "fused", model.parameters())
        runs.append(history(scaler, model, [optimizer], plan(1), end=end))
    same(*runs)
    assert scales(runs[0])[4] == scale


@pytest.mark.parametrize("stepper", ["nobody", "the user"])
def test_unscale_without_scaler_step(stepper):
    """`unscale_`, look at the norm, and leave the step out, or take it by hand: both are common."""
    runs = []
    for scaler in (theirs(), ours()):
        model, rows = Net(), []
        optimizer = make("Adam", "plain", model.parameters())
        for i, step in enumerate(plan(2)):
            optimizer.zero_grad()
            backward(model, scaler, step)
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if i % 3 != 1:
                scaler.step(optimizer)
            elif stepper == "the user" and norm.isfinite():
                optimizer.step()
            scaler.update()
            tracker = scaler._get_growth_tracker()
            rows.append((scaler.get_scale(), tracker, [], every_bit(model, [optimizer])))
        runs.append(rows)
    same(*runs)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_parameter_types(kind, dtype):
    runs = []
    for scaler in (theirs(), ours()):
        model = Net().to(dtype)
        optimizer = make("Adam", kind, model.parameters())
        model.forward = lambda x, forward=model.forward: forward(x.to(dtype))
        runs.append(history(scaler, model, [optimizer], plan(5)))
    same(*runs)


def test_autocast_with_a_bfloat16_loss():
    runs = []
    for scaler in (theirs(), ours()):
        model = Net()
        optimizer = make("AdamW", "fused", model.parameters())

        def forward(x, inner=model.forward):
            with torch.autocast("cpu", torch.bfloat16):
                return inner(x).bfloat16()

        model.forward = forward
        runs.append(history(scaler, model, [optimizer], plan(6)))
    same(*runs)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
def test_sparse_gradients(name):
    runs = []
    for scaler in (theirs(), ours()):
        torch.manual_seed(0)
        table, rows = torch.nn.Embedding(9, 4, sparse=True), []
        optimizer = getattr(torch.optim, name)(table.parameters(), lr=0.5)
        for i in range(12):
            optimizer.zero_grad()
            # With duplicates SGD adds them one by one in torch, and their sum here: see `collect`.
            many = [1, 3, 7] if name == "SGD" else [1, 3, 3, i % 9]
            index = torch.tensor(many if i % 4 else [5])
            scaler.scale((table(index) * (i + 1)).sum()).backward()
            if i % 5 == 3:
                table.weight.grad._values()[-1, 2] = math.inf
            scaler.step(optimizer)
            scaler.update()
            rows.append((scaler.get_scale(), 0, [], every_bit(table, [optimizer])))
        runs.append(rows)
    same(*runs)


def test_losses_in_containers_are_scaled_one_by_one():
    losses = [torch.tensor(0.3), torch.tensor([1.7, -2.0])]
    for shape in (list, tuple, iter):
        left, right = (scaler.scale(shape(losses)) for scaler in (theirs(), ours()))
        assert shape is iter or type(right) is shape
        assert [bits(x) for x in left] == [bits(x) for x in right]


def test_optimizers_that_ask_for_the_scaler():
    """The older contract: `step(grad_scaler=)` checks and unscales on its own."""

    class Asks(torch.optim.SGD):
        _step_supports_amp_scaling = True

        @torch.no_grad()
        def step(self, closure=None, *, grad_scaler=None):
            found = grad_scaler._check_inf_per_device(self)
            assert sum(grad_scaler._found_inf_per_device(self).values()) == sum(found.values())
            if sum(found.values()) == 0:
                for p in self.param_groups[0]["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad / grad_scaler._get_scale_async() * 0.05)

    runs = []
    for scaler in (theirs(), ours()):
        model = Net()
        optimizer = Asks(model.parameters(), lr=0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch wants to give this up
            runs.append(history(scaler, model, [optimizer], plan(1)))
    same(*runs)


# Saved and loaded in mid-run


def as_json(state):
    return json.loads(json.dumps(state))


@every_kind
@pytest.mark.parametrize("source", [theirs, ours])
@pytest.mark.parametrize("target", [theirs, ours])
def test_state_goes_in_all_four_directions(source, target, kind):
    def change(scaler):
        fresh = target(init_scale=4.0, growth_interval=77)
        fresh.load_state_dict(as_json(scaler.state_dict()))
        return fresh

    runs = []
    for scaler, between in ((theirs(), None), (source(), change)):
        model = Net()
        optimizer = make("Adam", kind, model.parameters())
        runs.append(history(scaler, model, [optimizer], plan(4, 30), between=between))
    same(*runs)


def test_a_saved_state_is_what_is_loaded():
    scaler, model = ours(), Net()
    history(scaler, model, [make("Adam", "fused", model.parameters())], plan(4))
    saved = scaler.state_dict()
    assert as_json(saved) == saved
    assert saved["gradlift"]["skipped"] == scaler.skipped_steps > 0
    fresh = ours()
    fresh.load_state_dict(as_json(saved))
    assert fresh.state_dict() == saved
    assert fresh.skipped_steps == scaler.skipped_steps
    assert fresh.events == scaler.events
    five = {k: v for k, v in saved.items() if k != "gradlift"}
    peer = theirs()
    peer.load_state_dict(saved)
    assert peer.state_dict() == five


@pytest.mark.filterwarnings(ODD)
@pytest.mark.parametrize("source", [theirs, ours])
def test_an_odd_scale_can_be_loaded(source):
    """torch takes any scale, from its arguments or from update(new_scale)."""
    by_argument = source(init_scale=1000.0)
    by_hand = source()
    by_hand.scale(torch.zeros(()))  # torch wants to have scaled once
    by_hand.update(1000.0)
    for scaler in (by_argument, by_hand):
        fresh = ours()
        fresh.load_state_dict(scaler.state_dict())
        assert fresh.get_scale() == 1000.0
        assert copy.deepcopy(fresh).get_scale() == 1000.0


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_where_the_original_was(twin):
    kept = []

    def change(scaler):
        kept[:] = [scaler, scaler.state_dict()]
        copied = twin(scaler)
        assert type(copied) is type(scaler)
        assert copied.state_dict() == scaler.state_dict()
        return copied

    runs = []
    for scaler, between in ((theirs(), None), (ours(), change), (twin(ours()), None)):
        model = Net()
        optimizer = make("AdamW", "fused", model.parameters())
        runs.append(history(scaler, model, [optimizer], plan(7, 30), between=between))
        if between is not None:
            assert kept[0].state_dict() == kept[1]  # the copy's steps are its own
    same(runs[0], runs[1])
    same(runs[0], runs[2])


@pytest.mark.parametrize("rule", ["auto", "megatron:hysteresis=4", "metaseq", "static:8"])
def test_a_copy_has_the_rules_history(rule):
    scaler, model = GradScaler("cpu", rule=rule, max_consecutive_skips=99), Net()
    history(scaler, model, [make("Adam", "plain", model.parameters())], plan(8, 12))
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert copied.state_dict() == scaler.state_dict()
        twins = [copy.deepcopy(model) for _ in range(2)]
        optimizers = [make("Adam", "plain", twin.parameters()) for twin in twins]
        fresh = copy.deepcopy(scaler)
        same(
            history(copied, twins[0], [optimizers[0]], plan(9, 12)),
            history(fresh, twins[1], [optimizers[1]], plan(9, 12)),
        )
        assert copied.get_scale() == fresh.get_scale()


# Clipping, which is ours: torch's two calls in one


def lengths(seed, scale):
    """Gradients of three tensors, as scaled."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (7,), (2, 2, 2)]
    return [torch.randn(s, generator=draw) * 10.0 ** ((seed % 7) - 3) * scale for s in shapes]


def ulps(left, right):
    a, b = (x.detach().contiguous().view(torch.int32).long() for x in (left, right))
    assert ((a < 0) == (b < 0)).all()  # the same signs, so that bits can be subtracted
    return int((a - b).abs().max())


def clipped(scaler, seed, kind, name, max_norm, how):
    scale = scaler.get_scale()
    params = [torch.nn.Parameter(torch.ones_like(g)) for g in lengths(seed, scale)]
    optimizer = make(name, kind, params)
    scaler.scale(torch.ones(()))
    for p, g in zip(params, lengths(seed, scale), strict=True):
        p.grad = g
    if how == "torch":
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        scaler.step(optimizer)
    elif how == "clip_grad_norm_":
        norm = scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
    elif how == "unscaled first":
        scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
    else:
        scaler.step(optimizer, max_norm=max_norm)
        norm = torch.tensor(scaler.result.grad_norm, dtype=torch.float32)
    scaler.update()
    return norm, [p.grad for p in params], params


@every_optimizer
@every_kind
@pytest.mark.parametrize("how", ["clip_grad_norm_", "step", "unscaled first"])
def test_clipping_is_torchs(name, kind, how):
    """2 ulp: coefficient and product are rounded once more in torch, a fused quotient in ours."""
    compared = 0
    for seed in range(24):
        for max_norm in (0.37, 1.0, 1e9):
            expected = clipped(theirs(), seed, kind, name, max_norm, "torch")
            norm, grads, params = clipped(ours(), seed, kind, name, max_norm, how)
            true = lengths(seed, 1.0)
            exact = math.sqrt(math.fsum(g.double().square().sum().item() for g in true))
            assert norm.item() == pytest.approx(exact, rel=2**-22)
            coefficient = min(1.0, max_norm / (norm.item() + 1e-6))
            for g, t in zip(grads, true, strict=True):
                assert ulps(g, (t.double() * coefficient).float()) <= 2
            if bits(norm) != bits(expected[0]):
                continue
            compared += 1
            most = 2 if coefficient < 1 else 0
            for ours_, theirs_ in zip(grads, expected[1], strict=True):
                assert ulps(ours_, theirs_) <= most
            if coefficient == 1:
                assert [bits(p) for p in params] == [bits(p) for p in expected[2]]
    assert compared > 24


@every_kind
@pytest.mark.parametrize("how", ["clip_grad_norm_", "step"])
@pytest.mark.parametrize("exponent", [-20, 60, 100, 120])
def test_clipping_at_any_scale(kind, how, exponent):
    """A power of two changes no bit, wherever it lies."""
    for max_norm in (1e-6, 0.5):
        left = clipped(ours(init_scale=1.0), 3, kind, "SGD", max_norm, how)
        right = clipped(ours(init_scale=2.0**exponent), 3, kind, "SGD", max_norm, how)
        assert ulps(left[0], right[0]) <= 1  # sums are added up elsewhere if squares overflow
        for a, b in zip(left[1], right[1], strict=True):
            assert ulps(a, b) <= 2


def test_clipping_a_gradient_that_is_not_finite_steps_nowhere():
    for how in ("clip_grad_norm_", "step"):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([p], lr=1.0, fused=True), ours()
        scaler.scale((p * torch.tensor([1.0, math.inf, 2.0])).sum() * 0 + p.sum())
        p.grad = torch.tensor([1.0, math.inf, 2.0])
        if how == "step":
            scaler.step(optimizer, max_norm=1.0)
        else:
            assert not scaler.clip_grad_norm_(optimizer, 1.0).isfinite()
            scaler.step(optimizer)
        assert bits(p) == bits(torch.ones(3))


# Disabled


def test_disabled_does_nothing():
    for scaler in (theirs(enabled=False), ours(enabled=False)):
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=1.0)
        loss = p.sum() * math.nan
        assert scaler.scale(loss) is loss
        losses = [loss]
        assert scaler.scale(losses) is losses
        assert scaler.state_dict() == {}
        scaler.load_state_dict({"scale": "damaged"})
        p.grad = torch.tensor([1.0, math.inf])
        scaler.unscale_(optimizer)
        assert p.grad.tolist() == [1.0, math.inf]
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [0.0, -math.inf]
        assert scaler.get_scale() == 1.0
        assert not scaler.is_enabled()
        assert not copy.deepcopy(scaler).is_enabled()


def test_disabled_returns_what_the_optimizer_returns():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), ours(enabled=False)
    p.grad = torch.tensor([3.0, 4.0])
    assert scaler.step(optimizer, lambda: 7.0, max_norm=1.0) == 7.0
    assert p.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_it_is_a_torch_scaler():
    scaler = ours()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    public = [n for n in dir(torch.amp.GradScaler) if not n.startswith("_")]
    assert not [n for n in public if not hasattr(scaler, n)]


# Damage


def changed(**changes):
    return lambda state: {**state, **changes}


def inside(**changes):
    return lambda state: {**state, "gradlift": {**state["gradlift"], **changes}}


def without(name):
    return lambda state: {k: v for k, v in state.items() if k != name}


FIVE = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
ZERO = 0
PAIR = torch.tensor([8.0, 8.0])
BAD = [math.nan, math.inf, -1.0, ZERO, 0.0, "8", None, True, [8.0], {}, PAIR, 10**400]
BAD_KEYS = [{"a": None}, {"a": {}}, {"a": {"scale": 0.0, "clean": 0}}]
DAMAGE = {
    **{f"without {name}": without(name) for name in FIVE},
    **{
        f"{name}={value!r:.12}": changed(**{name: value})
        for name in FIVE
        for value in BAD
        if not (name == "_growth_tracker" and value is ZERO)
    },
    "growth_factor=0.9": changed(growth_factor=0.9),
    "backoff_factor=1.1": changed(backoff_factor=1.1),
    "scale is a tensor of NaN": changed(scale=torch.tensor(math.nan)),
    "growth_interval=2.5": changed(growth_interval=2.5),
    "_growth_tracker=0.5": changed(_growth_tracker=0.5),
    "empty": lambda state: {},
    **{
        f"a {type(x).__name__}": lambda state, x=x: x
        for x in (None, [], (), "state", 3, [("scale", 8.0)])
    },
    "gradlift is a list": changed(gradlift=[1]),
    "gradlift is None": changed(gradlift=None),
    **{
        f"gradlift.{name}={value!r:.12}": inside(**{name: value})
        for name, values in {
            "schema": [2, None, "1"],
            "rule": ["headroom", None, 3],
            "skips": [-1, 0.5, "1", None],
            "left": [-1, 0.5, "1", None],
            "steps": [-1, 0.5, "1", None, True],
            "skipped": [-1, 0.5, "1", None, True],
            "keys": [None, {}, "[1]", "3", "{", *map(json.dumps, BAD_KEYS)],
            "events": [None, [], "3", "[3]", "[", '[[1, "skip"]]', '[[1, "skip", 3]]'],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_states_are_refused_and_change_nothing(damage):
    scaler, model = ours(), Net()
    optimizer = make("SGD", "plain", model.parameters())
    history(scaler, model, [optimizer], plan(4, 12))
    state, scale = scaler.state_dict(), scaler.get_scale()
    good = {**as_json(state), "scale": 2.0, "growth_interval": 9}  # loadable, and not what it has
    with pytest.raises(StateError) as caught:
        scaler.load_state_dict(DAMAGE[damage](good))
    assert isinstance(caught.value, ValueError)
    assert scaler.state_dict() == state
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (scale, 3)
    scaler.load_state_dict(good)  # the undamaged one: else this test would prove nothing
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (2.0, 9)


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_damaged_factors_are_refused_by_other_rules_too(name):
    scaler = GradScaler("cpu", rule="auto")
    state = scaler.state_dict()
    with pytest.raises(StateError):
        scaler.load_state_dict({**state, name: "damaged"})
    assert scaler.state_dict() == state
