"""Probes: what flows between modules, seen on sampled steps, without changing a bit of training."""

import copy
import dataclasses
import gc
import io
import math
import pickle
import warnings
from typing import NamedTuple

import pytest
import torch
from helpers.torch import bits
from torch import nn

from gradlift import Journal, read_journal, replay
from gradlift.errors import MisuseError, SettingsError
from gradlift.reading import NAN, Reading
from gradlift.torch import GradScaler, probe
from gradlift.torch.nested import mapped, tensors
from gradlift.torch.probing import GradientWatcher, largest, samples, watch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(8), nn.Linear(8, 32)
        self.act, self.narrow = nn.GELU(), nn.Linear(32, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = x + self.narrow(self.act(self.wide(self.norm(x))))
        return self.head(x)


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 8, generator=g), torch.randint(3, (16,), generator=g)


def loss_of(model, seed=0):
    x, y = data(seed)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return nn.functional.cross_entropy(out.float(), y)


def train(model, scaler, steps, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def test_no_bit_of_training_changes():
    plain, watched = make(), make()
    probe(watched, every=3)
    for model in (plain, watched):
        train(model, GradScaler("cpu", init_scale=2.0**13), 30)
    assert bits(plain) == bits(watched)


def test_it_sees_the_peak_of_every_float16_gradient_at_a_module_border():
    model, by_hand, held = make(), {}, {}
    watched = probe(model, every=1)

    def keep(name):
        def hook(module, args, out):
            held[name] = out
            out.retain_grad()

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(keep(name))
    scaler = GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(loss_of(model)).backward()
    for name, out in held.items():
        if out.dtype is torch.float16:
            by_hand[name] = out.grad.abs().max().item()
    assert {"wide", "act", "narrow", "head"} <= set(by_hand)
    assert {n: watched.seen[n]["amax"] for n in ("head", "act")} == {
        n: by_hand[n] for n in ("head", "act")
    }
    assert watched.peak() >= max(by_hand.values())
    shares = watched.seen["act"]
    grad = held["act"].grad
    assert shares["elements"] == grad.numel()
    assert shares["zero"] == (grad == 0).float().mean().item()


def test_a_gradient_is_seen_where_it_still_is_float16():
    """A linear layer's float32 input: its gradient was made in float16 and cast afterwards."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[1].weight.fill_(2.0**6)
    watched = probe(model, every=1)
    with torch.autocast("cpu", torch.float16):
        out = model(torch.randn(2, 4))
    assert out.dtype is torch.float16
    out.float().sum().backward()
    assert watched.seen["1"]["amax"] == 4 * 2.0**6  # what flows out below, not the 1.0 from above


def test_gradients_that_never_were_float16_are_not_its_business():
    model = make()
    watched = probe(model, every=1)
    x, y = data()
    nn.functional.cross_entropy(model(x), y).backward()
    assert watched.seen == {}
    assert watched.peak() is NAN


def test_bfloat16_has_float32s_range_and_is_not_looked_at():
    model = make()
    watched = probe(model, every=1)
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    nn.functional.cross_entropy(out.float(), y).backward()
    assert watched.peak() is NAN


def test_only_sampled_passes_carry_hooks():
    model = make()
    watched = probe(model, every=4)
    hooked = []
    model.narrow.register_forward_pre_hook(
        lambda m, a: hooked.append(len(model.wide._forward_hooks))
    )
    for _ in range(9):
        loss_of(model).backward()
        assert not model.wide._forward_hooks
    assert hooked == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    with torch.no_grad():
        loss_of(model)
    assert watched.calls == 9
    watched.remove()
    assert not model._forward_pre_hooks
    watched.remove()


def test_a_pass_that_fails_leaves_no_hooks():
    model = make()
    watched = probe(model, every=1)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5))
    assert not model.wide._forward_hooks
    loss_of(model).backward()
    assert watched.seen["head"]["amax"] > 0


def test_after_an_overflow_the_next_pass_is_looked_at():
    model = make()
    watched = probe(model, every=100)
    scaler = GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, scaler, 2, optimizer)
    assert scaler.skipped_steps == 2
    assert watched.again
    scaler.update(2.0**8)
    train(model, scaler, 2, optimizer)
    assert not watched.again
    assert math.isfinite(watched.seen["head"]["amax"])


class Hidden(nn.Module):
    """Inputs of 2^-8: activation gradients lie eight bits above those of the weights."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))

    def forward(self, x):
        return self.body(x * 2.0**-8)


@pytest.mark.parametrize("device_path", [False, True])
def test_the_rule_gets_what_no_parameter_shows(device_path):
    skipped = {}
    for looks in (False, True):
        torch.manual_seed(0)
        model = Hidden()
        if looks:
            probe(model, every=1)
        scaler = GradScaler("cpu", rule="headroom:init_scale=2^4,margin_bits=1")
        scaler._force_device_path = device_path
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(40):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().abs().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        skipped[looks] = scaler.skipped_steps
    assert skipped[True] == 0
    assert skipped[False] > 0


def test_it_is_recorded(tmp_path):
    model = make()
    probe(model, every=5)
    with Journal(tmp_path / "run.jsonl") as journal:
        train(model, GradScaler("cpu", init_scale=2.0**10, journal=journal), 12)
    run = read_journal(tmp_path / "run.jsonl")
    assert [p.step for p in run.probes] == [0, 5, 10]
    assert set(run.probes[0].modules) >= {"wide", "act", "narrow", "head"}
    assert [s.step for s in run.steps if s.probe_amax > 0] == [0, 5, 10]
    top = max(shares["amax"] for shares in run.probes[1].modules.values())
    assert run.steps[5].probe_amax == top


def test_copies_of_the_model_go_their_own_way():
    model = make()
    watched = probe(model, every=1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(twin).backward()
    assert watched.calls == 0
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    loss_of(model).backward()
    assert watched.calls == 1


def test_two_models_are_kept_apart():
    one, two = make(1), make(2)
    watched = {1: probe(one, every=1), 2: probe(two, every=1)}
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(loss_of(two) * 2.0**4).backward()
    scaler.scale(loss_of(one)).backward()
    mine = watched[1].peak()
    assert watched[2].peak() > mine
    scaler.step(optimizer)
    window = next(iter(scaler._scales[None].windows.values()))
    assert window.reading.probe_amax == mine
    scaler.update()
    assert not watched[1].looked
    assert samples(list(two.parameters())) == {}  # its window never ended


def test_micro_batches_count_one_by_one():
    model = make()
    watched = probe(model, every=2)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    for seed in range(4):
        scaler.scale(loss_of(model, seed)).backward()
    # Of the first and the third, each what comes in from above and what goes out below.
    assert len(watched.found["head"]) == 4


def test_a_watcher_that_is_gone_is_not_asked():
    class Loud(GradientWatcher):
        looked = True

        def covers(self, params):
            raise AssertionError("asked")

    watch(Loud())
    train(make(), GradScaler("cpu", init_scale=2.0**8), 1)


def test_the_largest_of_numbers_and_tensors():
    assert largest([NAN, NAN]) is NAN
    assert largest([2.0, torch.tensor(3.0), 1.0]).item() == 3.0
    assert largest([torch.tensor(3.0), 4.0, torch.tensor(1.0)]).item() == 4.0
    assert largest([1.0, math.inf]) == math.inf


def test_a_nan_on_the_way_is_an_infinite_peak():
    model = make()
    watched = probe(model, every=1)
    (loss_of(model) * math.nan).backward()
    assert watched.peak() == math.inf
    watched.ended(Reading(True, math.inf), 1.0)
    assert watched.again


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_checked(every):
    with pytest.raises(SettingsError, match="every is"):
        probe(make(), every=every)


def test_a_model_is_wanted():
    with pytest.raises(MisuseError, match=r"wants a torch.nn.Module"):
        probe(list(make().parameters()))


# what a hostile reader tried


def half_loss(model, x, factor=1.0):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return out.float().mean() * factor


def step(scaler, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("together", [False, True])
def test_another_scalers_pass_through_the_model_is_not_taken_for_its_own(together):
    """A GAN: the generator's loss goes through the discriminator, at the generator's scale; the
    two are stepped in turns, or together at the end."""
    scales = {}
    for looks in (False, True):
        torch.manual_seed(0)
        G, D = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        if looks:
            probe(D, every=1)
        og, od = (torch.optim.SGD(m.parameters(), lr=0.0) for m in (G, D))
        sg, sd = GradScaler("cpu", init_scale=2.0**19), GradScaler("cpu", rule="auto")
        for i in range(120):
            z = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
            waiting = []
            for scaler, optimizer, model, x, times in (
                (sg, og, nn.Sequential(G, D), z, 1.0),
                (sd, od, D, G(z).detach(), 2.0 ** -(i % 4)),
            ):
                optimizer.zero_grad()
                scaler.scale(half_loss(model, x, times)).backward()
                waiting.append((scaler, optimizer))
                while waiting and (scaler is sd or not together):
                    each, its = waiting.pop(0)
                    each.step(its)
                    each.update()
        scales[looks] = sd.get_scale()
    assert scales[True] >= scales[False] / 4


@pytest.mark.parametrize("how", ["update", "load"])
def test_what_was_seen_at_a_scale_that_is_gone_is_forgotten(how):
    model = make()
    watched = probe(model, every=1)
    scaler = GradScaler("cpu", rule="auto")
    saved = scaler.state_dict()
    scaler.scale(loss_of(model)).backward()
    assert watched.looked
    scaler.update(2.0**8) if how == "update" else scaler.load_state_dict(saved)
    assert not watched.looked


def test_a_turn_is_kept_until_something_is_seen_and_not_for_ever():
    model = make()
    watched = probe(model, every=10)
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), 0.0)
    for seed in range(4):
        loss_of(model, seed)  # an old policy's answer: never differentiated
        step(scaler, optimizer, loss_of(model, seed))
    assert set(watched.seen) >= {"head", "wide"}
    quiet = make()
    full, hooked = probe(quiet, every=10), []
    quiet.narrow.register_forward_pre_hook(
        lambda m, a: hooked.append(len(quiet.wide._forward_hooks))
    )
    for _ in range(8):
        quiet(data()[0]).sum().backward()  # float32: nothing to see
    assert full.seen == {}
    assert hooked == [1, 1, 1, 0, 0, 0, 0, 0]


def test_an_overflow_between_two_looks_leaves_what_was_seen():
    model = make()
    watched = probe(model, every=100)
    scaler, optimizer = GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), 0.0)
    step(scaler, optimizer, loss_of(model))
    seen = watched.seen
    step(scaler, optimizer, loss_of(model) * 1e38)
    assert scaler.skipped_steps == 1
    assert watched.seen == seen != {}


def test_a_try_that_is_done_again_is_not_what_is_recorded(tmp_path):
    model = make()
    probe(model, every=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = GradScaler("cpu", rule="auto", journal=journal)
        tiny = lambda: loss_of(model) * 2.0**-20
        result = scaler.train_step(tiny, optimizer, retries=8, model=model)
    assert result.retries > 0
    run = read_journal(tmp_path / "run.jsonl")
    (seen,) = run.probes
    assert max(s["amax"] for s in seen.modules.values()) == run.steps[0].probe_amax
    assert replay(run, run.header["rule"], retries=8).steps[0].scale == run.steps[0].scale


def test_what_cannot_be_looked_at_does_not_break_a_run():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    params = dict(model.named_parameters())
    probe(model, every=1)

    def f(params, x):
        with torch.autocast("cpu", torch.float16):
            return torch.func.functional_call(model, params, (x[None],)).float().sum()

    with pytest.warns(UserWarning, match="could not look at"):
        grads = torch.func.vmap(torch.func.grad(f), (None, 0))(params, torch.randn(5, 4))
    assert grads["0.weight"].shape == (5, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    watched = probe(scripted, every=1)
    half_loss(scripted, torch.randn(2, 4)).backward()
    assert "1" in watched.seen
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.randn(2, 4)).sum().backward()


# Two watchers of one network


class Fixed(GradientWatcher):
    """Shows the same shares each time."""

    def __init__(self, **shares):
        self.shares = shares
        watch(self)

    def covers(self, params):
        return True

    def samples(self):
        return {"layer": self.shares}


def test_of_two_watchers_the_first_one_counts_and_the_second_adds():
    gc.collect()  # watchers of other tests
    for n in range(8):  # objects lie elsewhere each time: no order by chance
        some = [object() for _ in range(n)]
        first = Fixed(amax=1.0, zero=0.5)
        second = Fixed(amax=2.0, lift=8.0)
        assert samples([])["layer"] == {"amax": 1.0, "zero": 0.5, "lift": 8.0}, some
        third = Fixed(amax=3.0, lift=4.0, subnormal=0.25)
        del first
        want = {"amax": 2.0, "lift": 8.0, "subnormal": 0.25}
        assert samples([])["layer"] == want, (second, third)
        del second, third


# What modules take and return


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str = "x"
    parts: tuple = ()


class Pair(NamedTuple):
    left: object
    right: object


def test_a_dataclass_output_is_looked_at():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 3)

        def forward(self, x):
            return Output(self.inner(x) * 2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapped = Wrapped()

        def forward(self, x):
            return self.wrapped(x).logits.float()

    model = Outer()
    watched = probe(model, every=1)
    with torch.autocast("cpu", torch.float16):
        out = model(torch.ones(1, 8))
    (out.sum() * 4).backward()
    assert watched.seen["wrapped"]["amax"] == 4.0
    assert watched.seen["wrapped.inner"]["amax"] == 8.0


def test_tensors_are_found_in_all_that_modules_return():
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    value = {"a": [a, 1], "b": Pair(b, Output(c, parts=(d, None)))}
    assert [t.item() for t in tensors(value)] == [0, 1, 2, 3]
    assert tensors((a, [a, a])) == [a, a, a]
    assert tensors([Output, "text", 3]) == []
    endless = [a]
    endless.append(endless)
    assert tensors(endless) == [a]


def test_tensors_are_mapped_and_the_rest_stays():
    a, b = torch.ones(1), torch.ones(1)
    value = {"a": [a, 1], "b": Pair(b, Output(a, "name", (b,))), "c": (same := [2, "text"])}
    new = mapped(value, lambda t: t + 1)
    assert [t.item() for t in tensors(new)] == [2, 2, 2, 2]
    assert (type(new["b"]), type(new["b"].right), new["b"].right.name) == (Pair, Output, "name")
    assert new["c"] is same
    assert [t.item() for t in tensors(value)] == [1, 1, 1, 1]
    assert mapped(value, lambda t: t) is value
