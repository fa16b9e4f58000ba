"""Saved, loaded, gone on: the same rule, the same bits; damage is refused."""

import json

import pytest
import torch
from helpers.torch import both_paths, exploding, made, net, step, train

from gradlift.errors import StateError
from gradlift.torch import GradScaler


def test_json_round_trip_before_first_use():
    scaler = GradScaler("cpu", init_scale=2.0**9)
    data = json.loads(json.dumps(scaler.state_dict()))
    other = GradScaler("cpu")
    other.load_state_dict(data)
    assert other.state_dict() == data
    assert other.get_scale() == 2.0**9


def test_the_last_64_events_are_in_the_state():
    model = net(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    train(scaler, model, optimizer, [exploding] * 70)
    other = GradScaler("cpu")
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert len(other.events) == 64
    assert other.events[-1].step == 69
    assert (other.skipped_steps, other.consecutive_skips) == (70, 70)


def test_a_state_loaded_between_backward_and_step_starts_a_new_window():
    w, optimizer, scaler = made()
    saved = scaler.state_dict()
    scaler.scale(w.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.load_state_dict(saved)
    step(w, optimizer, scaler)
    assert w.item() == -1.0


@both_paths
@pytest.mark.parametrize("name", ["steps", "skipped"])
def test_a_count_of_more_than_32_bits_is_refused_before_anything_is_changed(device_path, name):
    w, optimizer, scaler = made(device_path)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    before = scaler.state_dict()
    damaged = {**before, "scale": 64.0, "gradlift": {**before["gradlift"], name: 2**40}}
    with pytest.raises(StateError, match="expected two counts"):
        scaler.load_state_dict(damaged)
    assert scaler.state_dict() == before
