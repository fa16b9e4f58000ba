"""A run that only skips is stopped."""

import pytest
import torch
from helpers.torch import OVERFLOW, bits, exploding, made, net, step, train

from gradlift.errors import TrainingHalted
from gradlift.torch import GradScaler


# Listening
def test_events_limits_and_warnings():
    model = net(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = []
    scaler = GradScaler("cpu", max_consecutive_skips=3, on_event=heard.append, names=model)
    before = bits(model)
    with pytest.raises(TrainingHalted, match=r"4 steps in a row were skipped, since step 0.*2\^13"):
        train(scaler, model, optimizer, [exploding] * 9)
    assert before == bits(model)
    assert [(e.step, e.what) for e in heard] == [(0, "skip"), (1, "skip"), (2, "skip"), (3, "halt")]
    assert (
        heard[0].detail["culprits"][0].endswith("(inf)") or "nan" in heard[0].detail["culprits"][0]
    )
    assert heard[0].detail["next_scale"] == 2.0**15
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=8.0, on_floor="warn")
    with pytest.warns(UserWarning, match=r"at the smallest scale, 2\^3"):
        train(scaler, model, optimizer, [exploding])


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
