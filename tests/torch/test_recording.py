"""Results, events and journals of a run; recording changes nothing."""

import gc
import weakref

import pytest
import torch
from helpers.torch import OVERFLOW, X, bits, both_paths, half_loss, made, net, step, train

import gradlift
from gradlift import Journal, Verdict, read_journal, replay
from gradlift.torch import GradScaler, MasterWeights


@pytest.mark.parametrize("device_path", [False, True])
def test_recording_changes_no_bit_and_the_run_replays(tmp_path, device_path):
    runs = []
    for recorded in (False, True):
        model = net(8, 8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        journal = Journal(tmp_path / "run.jsonl") if recorded else None
        scaler = GradScaler(
            "cpu",
            init_scale=2.0**20,
            growth_interval=5,
            journal=journal,
            names=model,
            every=4,
        )
        scaler._force_device_path = device_path
        losses = [(lambda m, i=i: half_loss(m, X, 2.0 ** (i % 7))) for i in range(40)]
        train(scaler, model, optimizer, losses, max_norm=1.0)
        runs.append(bits(model))
    assert runs[0] == runs[1]
    run = read_journal(tmp_path / "run.jsonl")
    assert len(run.steps) == (39 if device_path else 40)  # a device tells one step late
    assert run.skipped > 0
    assert run.header["parameters"]["0.weight"] == 64
    assert run.steps[-1].lr == 1e-2
    assert [s.step for s in run.samples] == list(range(0, 40, 4))
    assert 0 <= run.samples[1].parameters["0.weight"]["zero"] <= 1
    again = replay(run, "torch:init_scale=2^20,growth_interval=5")
    assert [s.scale for s in again.steps] == [s.scale for s in run.steps]
    assert {s.verdict for s in run.steps} == {Verdict.APPLY, Verdict.SKIP}


def test_samples_are_of_the_gradients_as_scaled_even_if_unscaled_by_hand(tmp_path):
    w = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = GradScaler("cpu", init_scale=2.0**10, journal=journal, every=1)
        scaler.scale((w * 2.0).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 1e-3)
        scaler.step(optimizer)
        scaler.update()
    (sample,) = read_journal(tmp_path / "run.jsonl").samples
    (shares,) = sample.parameters.values()
    assert shares["exponents"] == {"11": 4}


def test_a_listener_that_raises_leaves_the_scaler_whole():
    def listen(event):
        raise KeyError(event.what)

    w, optimizer, scaler = made(on_event=listen)
    with pytest.raises(KeyError):
        step(w, optimizer, scaler, OVERFLOW)
    assert (scaler.get_scale(), scaler.skipped_steps) == (2.0**15, 1)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    step(w, optimizer, scaler)
    assert scaler.result.stepped


@both_paths
def test_an_unread_result_keeps_no_gradient_alive(device_path):
    w, optimizer, scaler = made(device_path, fused=True, size=10)
    step(w, optimizer, scaler)
    gradient = weakref.ref(w.grad)
    kept = scaler.result
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert gradient() is None
    assert kept.stepped


@both_paths
@pytest.mark.parametrize("slope", [1.0, 5e19])
def test_recording_changes_no_bit_of_large_tensors(tmp_path, device_path, slope):
    weights = []
    for journal in (None, Journal(tmp_path / "run.jsonl")):
        w, optimizer, scaler = made(device_path, size=1_500_000, journal=journal, init_scale=1.0)
        torch.manual_seed(0)
        noise = torch.randn_like(w.detach()) * slope
        clip = {"max_norm": 0.5} if slope == 1.0 else {}
        for _ in range(2):
            step(w, optimizer, scaler, noise, **clip)
        weights.append(w.detach().clone())
    assert torch.equal(*weights)
    assert weights[0].abs().sum() > 0


@both_paths
def test_recording_changes_no_bit_where_some_gradients_are_no_part_of_amax(tmp_path, device_path):
    """An embedding and norms under autocast: amax, which a journal asks for, leaves them out. The
    norm, by which everything is clipped, must be added up as without a journal."""
    weights, norms = [], []
    for journal in (None, Journal(tmp_path / "run.jsonl")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(50, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 47)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = GradScaler("cpu", journal=journal)
        scaler._force_device_path = device_path
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randint(50, (8, 7))).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=0.01)
            norms.append(scaler.result.grad_norm)
            scaler.update()
        scaler.flush()
        weights.append(bits(model))
    assert norms[:20] == norms[20:]
    assert weights[0] == weights[1]
    assert read_journal(tmp_path / "run.jsonl").steps[0].amax > 0


@both_paths
@pytest.mark.parametrize("kind", ["plain", "fused", "masters"])
@pytest.mark.parametrize("rule", [None, "auto", "static:2^6"])
def test_a_run_around_changes_no_result_event_or_state(tmp_path, device_path, kind, rule):
    """It may ask for norms, and know of skips, that the scaler would not show by itself."""

    def trained():
        dtype = torch.float16 if kind == "masters" else torch.float32
        model = net(8, 1).to(dtype)
        if kind == "masters":
            optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=kind == "fused")
        scaler = GradScaler("cpu", rule=rule)
        scaler._force_device_path = device_path
        for i in range(6):
            optimizer.zero_grad()
            factor = {1: float("nan"), 3: 2.0**126}.get(i, 1.0)
            scaler.scale(model(X.to(dtype)).float().square().mean() * factor).backward()
            if i == 4:
                yield float(scaler.clip_grad_norm_(optimizer, 0.1))
            scaler.step(optimizer)
            scaler.update()
            yield repr((scaler.result, scaler.result.grad_norm, scaler.events))
        yield repr(scaler.state_dict())
        yield bits(model)

    plain = list(trained())
    with gradlift.record(tmp_path / "run.jsonl") as session:
        assert list(trained()) == plain
    steps = session.run.steps
    assert [s.skipped for s in steps] == [False, True, False, True, False, False]
    assert all(s.norm > 0 for s in steps if not s.skipped)


@both_paths
def test_a_device_tells_the_rest_when_asked(tmp_path, device_path):
    path = tmp_path / "run.jsonl"
    w, optimizer, scaler = made(device_path, fused=True, journal=Journal(path))
    for _ in range(5):
        step(w, optimizer, scaler, 100.0)
    scaler.flush()
    run = read_journal(path)
    assert [s.step for s in run.steps] == list(range(5))
    assert replay(run, "torch").skipped == 0  # 100 * 2^16 is no overflow in float32


def test_a_journal_keeps_keys_apart(tmp_path):
    path = tmp_path / "run.jsonl"
    w, optimizer, scaler = made(journal=Journal(path))
    v = torch.nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([v], lr=1.0)
    for i in range(6):
        for p, o, key in ((w, optimizer, "g"), (v, other, "d")):
            o.zero_grad()
            scaler.scale(
                (p * (OVERFLOW if key == "d" and i < 3 else 1.0)).sum(), key=key
            ).backward()
            scaler.step(o, key=key)
        scaler.update()
    run = read_journal(path)
    assert [s.key for s in run.steps] == ["g", "d"] * 6
    again = replay(run, "torch")
    assert [s.scale for s in again.steps] == [s.scale for s in run.steps]
    assert {e.detail["key"] for e in run.events if e.what == "skip"} == {"d"}
