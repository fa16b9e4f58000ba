"""The same batch again at a lower scale: no batch is lost, and nothing else changes."""

import numpy as np
import pytest
import torch
from helpers.torch import X, bits, good, half_loss, net

from gradlift.errors import MisuseError
from gradlift.torch import GradScaler


# Retry
class Noisy(torch.nn.Module):
    """Dropout and BatchNorm: random states and buffers that a retry has to put back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.5)
        )
        self.head = torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def noisy_run(init_scale, retries, steps=6, fused=False, journal=None):
    torch.use_deterministic_algorithms(True)
    try:
        model = Noisy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = GradScaler("cpu", init_scale=init_scale, journal=journal)
        torch.manual_seed(7)
        np.random.seed(7)
        results = [
            scaler.train_step(
                lambda: half_loss(model, X), optimizer, max_norm=1.0, retries=retries, model=model
            )
            for _ in range(steps)
        ]
        state = bits([*model.parameters(), *model.buffers(), torch.get_rng_state()])
        return state, results, scaler
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fused", [True, False])
def test_a_retried_run_equals_one_that_started_at_the_lower_scale(fused):
    high, results, scaler = noisy_run(2.0**24, retries=20, fused=fused)
    assert results[0].retries > 3
    assert all(r.stepped for r in results)
    assert [e.what for e in scaler.events] == ["retry"] * results[0].retries
    low, plain, _ = noisy_run(results[0].scale, retries=0, fused=fused)
    assert all(r.retries == 0 for r in plain)
    assert high == low


def test_the_retry_test_can_fail(monkeypatch):
    monkeypatch.setattr("gradlift.torch.scaler.retrying.Replay.restore", lambda self: None)
    high, results, _ = noisy_run(2.0**24, retries=20)
    low, _, _ = noisy_run(results[0].scale, retries=0)
    assert high != low


def test_retries_need_the_model():
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    with pytest.raises(MisuseError, match="retries need model="):
        scaler.train_step(lambda: good(model), optimizer, retries=1)
    assert scaler.train_step(lambda: good(model), optimizer, retries=1, model=False).stepped


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
