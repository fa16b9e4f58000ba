"""NumPy: everything a user may do, in any order, beside the reference."""

import json

import numpy as np
from conformance.reference import NumpyDriver
from machines.machine import EVERY_RULE, LIMITS, Whole, any_order, machine_for


class Numpy(Whole, NumpyDriver):
    CAN = {"retry", "save"}
    RULES, LIMITS, WINDOWS, mixes = EVERY_RULE, LIMITS, (0, 1, 2, 3), True
    sums, averages, half_weights = np.float32, False, False

    def train_step(self, loss, grads, retries):
        self.train([(loss, grads)], retries)

    def weights(self):
        return self.params

    def get_scale(self):
        return self.scaler.get_scale()

    def everything(self):
        return {n: w.tobytes() for n, w in self.params.items()}

    def save(self):
        return json.dumps([self.state_dict(), {n: w.tolist() for n, w in self.params.items()}])

    def load(self, saved):
        state, params = json.loads(saved)
        self.load_state_dict(state)
        for n, w in params.items():
            self.params[n][:] = np.float32(w)
        self.zero_grad()

    def kill(self):
        self.close()


MACHINES = [machine_for(Numpy)]


def test_any_order():
    any_order(MACHINES[0], 100)
