"""Killed at any instant and resumed: the same bits, and a journal that can be read."""

import keras
from helpers.kills import survivors

BACKEND = keras.backend.backend()


def test_a_killed_run_comes_to_the_same_end():
    kinds = [".keras", "weights", "checkpoint"] if BACKEND == "tensorflow" else [".keras"]
    found = survivors(f"keras-{BACKEND}", 2)
    assert found == [f"keras on {BACKEND}, {kind}" for kind in kinds]
