"""Killed at any instant and resumed: the same bits, and a journal that can be read."""

from helpers.kills import survivors


def test_a_killed_run_comes_to_the_same_end():
    assert survivors("torch", 4) == ["torch, host", "torch, device path", "torch, masters"]
