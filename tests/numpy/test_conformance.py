"""The NumPy adapter against the suites that every adapter passes."""

import numpy as np
import pytest
from conformance import exact
from conformance.records import *  # noqa: F403
from conformance.reference import NumpyDriver
from conformance.suite import *  # noqa: F403


@pytest.fixture
def Driver():
    return NumpyDriver


@pytest.mark.parametrize("rule", exact.EVERY)
def test_rules_give_the_same_bits(rule):
    exact.check(rule, np, lambda x, kind: np.asarray(x, kind))
