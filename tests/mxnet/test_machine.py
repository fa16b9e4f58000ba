"""MXNet: everything a user may do, in any order, beside the reference."""

import json

import numpy as np
import pytest
from machines.machine import BACKOFF, LIMITS, Whole, any_order, machine_for
from mxnet import nd
from test_conformance import OneDevice, TwoDevices, Unscaled


class Acting(Whole):
    CAN = {"save"}
    RULES = [*BACKOFF, "auto", "mxnet:growth_interval=2"]
    LIMITS, WINDOWS, mixes = LIMITS, (1, 2, 3), False
    sums, averages, half_weights = np.float32, False, False

    def get_scale(self):
        return self.scaler.get_scale()

    def everything(self):
        return {n: w.tobytes() for n, w in self.weights().items()}

    def save(self):
        return json.dumps([self.state_dict(), {n: w.tolist() for n, w in self.weights().items()}])

    def load(self, saved):
        state, weights = json.loads(saved)
        self.load_state_dict(state)
        for n, w in weights.items():
            self.params[n].set_data(nd.array(np.float32(w)))
        self.zero_grad()

    def zero_grad(self):
        super().zero_grad()
        for p in self.params.values():
            p.zero_grad()

    def kill(self):
        self.close()


class One(Acting, OneDevice):
    pass


class AfterUnscale(Acting, Unscaled):
    """`unscale` is called before each step."""


class Two(Acting, TwoDevices):
    """Two devices, whose gradients are added up."""


MACHINES = [machine_for(Driver) for Driver in (One, AfterUnscale, Two)]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_any_order(machine):
    any_order(machine, 25)
