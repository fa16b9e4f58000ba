"""Accelerate keeps its state in the process: every test begins without."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_accelerator_of_another_test():
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
