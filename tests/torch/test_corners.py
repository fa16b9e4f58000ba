"""GradScaler in corners: what a careful reader found, so that it stays found."""

import gc
import json
import math
import weakref

import pytest
import torch

from gradlift import Cause, Journal, read_journal, replay
from gradlift.errors import MisuseError, SettingsError, TrainingHalted
from gradlift.torch import GradScaler

both_paths = pytest.mark.parametrize("device_path", [False, True])


def made(device_path=False, fused=False, size=1, **settings):
    w = torch.nn.Parameter(torch.zeros(size))
    scaler = GradScaler("cpu", **settings)
    scaler._force_device_path = device_path
    return w, torch.optim.SGD([w], lr=1.0, fused=fused), scaler


def step(w, optimizer, scaler, slope=1.0, **options):
    optimizer.zero_grad()
    scaler.scale((w * slope).sum()).backward()
    scaler.step(optimizer, **options)
    scaler.update()


OVERFLOW = 1e38  # times any scale from 2^2 on


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


def test_training_can_go_on_after_a_late_halt():
    w, optimizer, scaler = made(device_path=True, fused=True, max_consecutive_skips=1)
    with pytest.raises(TrainingHalted, match="2 steps in a row"):
        for _ in range(4):
            step(w, optimizer, scaler, OVERFLOW)
    for _ in range(20):
        try:
            step(w, optimizer, scaler, 1.0)
        except TrainingHalted:
            continue
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


class Counts(torch.nn.Module):
    """A buffer that forward puts anew instead of changing it in place."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("n", torch.zeros(()))

    def forward(self):
        self.n = self.n + 1
        return (self.w.half() * 8).float().sum()


def test_a_retry_puts_back_buffers_that_were_exchanged():
    model = Counts()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    result = scaler.train_step(model, optimizer, retries=9, model=model)
    assert result.stepped
    assert result.retries > 1
    assert model.n == 1


@both_paths
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_exchanged_after_unscale_is_the_one_that_counts(device_path, fused):
    w, optimizer, scaler = made(device_path, fused)
    scaler.scale((w * 3).sum()).backward()
    scaler.unscale_(optimizer)
    w.grad = w.grad * 100
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.result.grad_norm == 300.0
    assert w.item() == pytest.approx(-1.0, rel=1e-5)


@both_paths
@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_put_there_after_unscale_is_not_applied(device_path, fused):
    w, optimizer, scaler = made(device_path, fused)
    scaler.scale((w * 3).sum()).backward()
    scaler.unscale_(optimizer)
    w.grad = torch.tensor([math.nan])
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.result.stepped
    assert [c.kind for c in scaler.result.culprits] == ["nan"]
    assert (w.item(), scaler.get_scale()) == (0.0, 2.0**15)


@both_paths
def test_a_vector_loss_in_float16_is_judged_by_its_elements(device_path):
    w, optimizer, scaler = made(device_path)
    losses = torch.full((2000,), 100.0, dtype=torch.float16) + w.half()
    scaler.scale(losses).float().mean().backward()
    scaler.step(optimizer)
    assert scaler.result.stepped


@both_paths
def test_a_dead_loss_skips_its_own_optimizer_only(device_path):
    a, opt_a, scaler = made(device_path)
    b = torch.nn.Parameter(torch.zeros(1))
    opt_b = torch.optim.SGD([b], lr=1.0)
    scaler.scale((a * math.nan).sum()).backward()
    scaler.scale((b * 2).sum()).backward()
    scaler.step(opt_a)
    assert scaler.result.cause is Cause.LOSS_NONFINITE
    scaler.step(opt_b)
    assert scaler.result.stepped
    scaler.update()
    assert (a.item(), b.item()) == (0.0, -2.0)
    assert scaler.get_scale() == 2.0**16


@both_paths
def test_a_batch_that_was_given_up_is_forgotten(device_path):
    w, optimizer, scaler = made(device_path)
    scaler.scale((w * math.nan).sum()).backward()
    step(w, optimizer, scaler)  # zero_grad, then a good batch
    assert scaler.result.stepped


@both_paths
def test_unscale_without_gradients(device_path):
    _, optimizer, scaler = made(device_path)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.result.cause is Cause.NO_GRADIENTS


def test_skip_all_cannot_hold_back_a_closure():
    w, _, scaler = made(skip="all")
    with pytest.raises(MisuseError, match="skip='all' cannot hold back a LBFGS"):
        scaler.step(torch.optim.LBFGS([w]), lambda: None)


@both_paths
def test_more_micro_batches_after_some_were_dropped(device_path):
    w, optimizer, scaler = made(device_path, init_scale=4.0)
    with scaler.accumulate(drop_bad=True) as window:
        for slope in (1.0, 3e38, math.nan):
            scaler.scale((w * slope).sum()).backward()
    assert window.dropped == [1, 2]
    scaler.scale((w * 2).sum()).backward()
    scaler.step(optimizer)
    assert scaler.result.stepped
    scaler.update()
    assert (w.item(), scaler.get_scale(), scaler.skipped_steps) == (-3.0, 2.0, 0)
    assert scaler.consecutive_skips == 0


@both_paths
@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_that_skip_together_step_without_what_was_dropped(device_path, fused):
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=1.0, fused=fused) for p in params]
    _, _, scaler = made(device_path, init_scale=4.0, skip="all")
    with scaler.accumulate(drop_bad=True) as window:
        for slope in (1.0, 3e38, 2.0):
            scaler.scale(sum(p * slope for p in params).sum()).backward()
    assert window.dropped == [1]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.result.stepped
    assert [p.item() for p in params] == [-3.0, -3.0]
    assert (scaler.get_scale(), scaler.skipped_steps) == (2.0, 0)


def test_the_first_bad_micro_batch_is_found_with_two_optimizers():
    a, opt_a, scaler = made(init_scale=4.0)
    b = torch.nn.Parameter(torch.zeros(1))
    opt_b = torch.optim.SGD([b], lr=1.0)
    for first in (1.0, 3e38):
        for i in range(4):
            scaler.scale((a * (first if i == 0 else 1.0)).sum() + b.sum()).backward()
        scaler.step(opt_a)
        told = scaler.result
        scaler.step(opt_b)
        scaler.update()
    assert told.micro_batch == 0


def test_a_state_loaded_between_backward_and_step_starts_a_new_window():
    w, optimizer, scaler = made()
    saved = scaler.state_dict()
    scaler.scale(w.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.load_state_dict(saved)
    step(w, optimizer, scaler)
    assert w.item() == -1.0


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


def test_settings_of_torchs_rule_do_not_go_with_another():
    with pytest.raises(SettingsError, match="belong into the rule"):
        GradScaler("cpu", init_scale=8.0, rule="auto")
    with pytest.raises(SettingsError, match="belong into the rule"):
        GradScaler("cpu", max_scale=8.0, rule="auto")


def test_asking_for_an_unknown_key_makes_none():
    _, _, scaler = made()
    assert scaler.get_scale("typo") == 2.0**16
    assert scaler.state_dict()["gradlift"]["keys"] == "{}"


def test_a_refusal_leaves_nothing_behind():
    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    w.grad = torch.ones_like(w)
    scaler = GradScaler("cpu")
    with pytest.raises(MisuseError, match="is a float16 parameter"):
        scaler.step(torch.optim.SGD([w], lr=1.0))
    json.dumps(scaler.__getstate__()["_saved"])


def test_gradients_unscaled_in_a_closure_are_not_divided_twice():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**10)

    def closure():
        optimizer.zero_grad()
        loss = (3 * weight).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        weight.grad.clamp_(-2, 2)
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert weight.item() == -2


class Observer(torch.nn.Module):
    """Makes room at its first batch, as torch.ao's observers do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x):
        if self.largest.numel() == 0:
            self.largest.resize_(x.shape[1:]).fill_(0)
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax(0)))
        return x


def test_a_retry_gives_back_a_buffer_that_has_grown():
    observer, linear = Observer(), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(observer, linear)
    scaler = GradScaler("cpu", init_scale=2.0**40)
    seen = []

    def closure():
        seen.append(tuple(observer.largest.shape))
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(2, 4)).float().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = scaler.train_step(closure, optimizer, retries=40, model=model)
    assert result.stepped
    assert result.retries > 0
    assert set(seen) == {(0,)}
    assert observer.largest.tolist() == [1.0] * 4
