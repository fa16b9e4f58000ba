"""apex's amp at O1: windows and journals in any order, beside the reference."""

import numpy as np
from conformance.suite import START
from machines.machine import BACKOFF, Whole, any_order, machine_for
from test_conformance_apex import ApexDriver


class Apex(Whole, ApexDriver):
    CAN = set()
    RULES, LIMITS, WINDOWS, mixes = [*BACKOFF, "auto"], [{}], (1, 2, 3), False
    sums, averages, half_weights = np.float32, False, False

    def weights(self):
        return {n: self.net[n].detach().numpy() for n in START}

    def get_scale(self):
        return self.scaler.get_scale()

    def everything(self):
        return {n: w.tobytes() for n, w in self.weights().items()}


MACHINES = [machine_for(Apex)]


def test_any_order():
    any_order(MACHINES[0], 25)
