"""torch: everything a user may do, in any order, beside the reference.

The reference of an optimizer that is not plain SGD is that optimizer itself, without a scaler, over
float32 weights and with the true gradients.
"""

import copy
import io

import numpy as np
import pytest
import torch
from helpers.torch import bits
from machines.machine import ACTIONS, EVERY_RULE, LIMITS, SIZES, START, any_order, machine_for

from gradlift import Journal
from gradlift.torch import GradScaler, MasterWeights


class Backward(torch.autograd.Function):
    """A loss and its gradients as given, with a backward pass in float16."""

    @staticmethod
    def forward(ctx, loss, grads, *params):
        ctx.grads, ctx.dtype = grads, params[0].dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        halves = [(torch.from_numpy(g) * upstream).half() for g in ctx.grads.values()]
        return None, None, *(g.to(ctx.dtype) for g in halves)


class Plain:
    """The optimizer of a driver, by itself: what its weights must be."""

    def __init__(self, make, sizes):
        self.params = {n: torch.nn.Parameter(torch.ones(k)) for n, k in sizes.items()}
        self.optimizer = make(list(self.params.values()))

    @property
    def weights(self):
        return {n: p.detach().numpy() for n, p in self.params.items()}

    def apply(self, grads):
        for name, p in self.params.items():
            p.grad = torch.from_numpy(grads[name].copy()) if name in grads else None
        self.optimizer.step()

    def join(self, name, size):
        self.params[name] = torch.nn.Parameter(torch.ones(size))
        self.optimizer.add_param_group({"params": [self.params[name]]})

    def saved(self):
        weights = {n: w.copy() for n, w in self.weights.items()}
        return weights, copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved):
        weights, state = saved
        for name in list(weights)[len(self.params) :]:
            self.join(name, SIZES[name])
        with torch.no_grad():
            for name, w in weights.items():
                self.params[name].copy_(torch.from_numpy(w))
        self.optimizer.load_state_dict(copy.deepcopy(state))


class Host:
    CANNOT = {}
    CAN = set(ACTIONS)
    RULES, LIMITS, WINDOWS, mixes = EVERY_RULE, LIMITS, (0, 1, 2, 3), True
    CLIPS = (2.0**30, 0.3)
    sums, averages, half_weights = np.float32, False, False
    device_path = False
    dtype = torch.float32
    make = staticmethod(lambda params: torch.optim.SGD(params, lr=1.0))

    def __init__(self, rule, journal=None, **limits):
        self.journal = Journal(journal) if journal else None
        ones = {n: torch.ones(k, dtype=self.dtype) for n, k in SIZES.items()}
        self.params = {n: torch.nn.Parameter(w) for n, w in ones.items()}
        self.names = list(START)
        self.scaler = GradScaler(
            "cpu", rule=rule, journal=self.journal, names=self.params, **limits
        )
        self.scaler._force_device_path = self.device_path
        self.optimizer = self.make([self.params[n] for n in self.names])

    # what a user does

    def scaled(self, loss, grads):
        given = torch.tensor(loss, dtype=torch.float32, requires_grad=True)
        if not grads:
            return given
        return Backward.apply(given.detach(), grads, *(self.params[n] for n in grads))

    def batch(self, loss, grads):
        scaled = self.scaler.scale(self.scaled(loss, grads))
        if grads:
            scaled.backward()

    def accumulate(self, batches):
        with self.scaler.accumulate(drop_bad=True):
            for batch in batches:
                self.batch(*batch)

    def train_step(self, loss, grads, retries):
        closure = lambda: self.scaled(loss, grads)
        self.scaler.train_step(closure, self.optimizer, retries=retries, model=False)

    def unscale_(self):
        self.scaler.unscale_(self.optimizer)

    def clip(self, max_norm):
        self.scaler.clip_grad_norm_(self.optimizer, max_norm)

    def clip_by_hand(self, max_norm):
        torch.nn.utils.clip_grad_norm_([self.params[n] for n in self.names], max_norm)

    def edit(self, name, index, value):
        self.params[name].grad[index] = value

    def step(self):
        self.scaler.step(self.optimizer)

    def update(self):
        self.scaler.update()

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=self.to_none)

    def add_group(self, name):
        self.names.append(name)
        self.optimizer.add_param_group({"params": [self.params[name]]})

    def freeze(self, name, frozen):
        self.params[name].requires_grad_(not frozen)

    # states

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, data):
        self.scaler.load_state_dict(data)

    def save(self):
        """A checkpoint."""
        held = {"scaler": self.state_dict(), "optimizer": self.optimizer.state_dict()}
        held["params"] = {n: p.detach() for n, p in self.params.items()}
        file = io.BytesIO()
        torch.save(held, file)
        return file.getvalue()

    def load(self, saved):
        held = torch.load(io.BytesIO(saved), weights_only=True)
        with torch.no_grad():
            for n, p in self.params.items():
                p.copy_(held["params"][n])
        self.optimizer.load_state_dict(held["optimizer"])
        self.scaler.load_state_dict(held["scaler"])
        self.optimizer.zero_grad()

    def kill(self):
        """True if the last line was not written."""
        if self.journal is not None:
            self.journal.close()
        return self.journal is not None and self.scaler._scales[None].due is not None

    def close(self):
        self.scaler.flush()
        if self.journal is not None:
            self.journal.close()

    # what is seen

    def weights(self):
        return {n: self.params[n].detach().numpy() for n in self.names}

    def get_scale(self):
        return self.scaler.get_scale()

    def everything(self):
        return bits([self.params, self.optimizer.state_dict()])

    @property
    def result(self):
        return self.scaler.result

    @property
    def skipped_steps(self):
        return self.scaler.skipped_steps


class Other(Host):
    """An optimizer with a state; the norm's last bits would stay in it."""

    CLIPS = (2.0**30,)

    @classmethod
    def mover(cls, sizes):
        return Plain(cls.make, sizes)


class Momentum(Other):
    make = staticmethod(
        lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, weight_decay=0.1)
    )


class Fused(Other):
    make = staticmethod(lambda params: torch.optim.AdamW(params, lr=0.1, fused=True))


class Device(Host):
    """The accelerator's path, on CPU tensors."""

    device_path = True


class DeviceFused(Fused):
    device_path = True
    LIMITS = [{}]  # a halt comes one step later

    def everything(self):
        """torch makes the moments, which are zero, before the kernel sees that it is to do nothing;
        so those that are zero do not count."""
        state = self.optimizer.state_dict()["state"]
        moments = [x for entry in state.values() for x in entry.values() if x.any()]
        return bits([self.params, moments])


class DeviceMomentum(Momentum):
    device_path = True
    LIMITS = [{}]
    CAN = Host.CAN - {"groups"}  # torch's fused SGD: a parameter that joins later is an error
    make = staticmethod(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=True))


class Masters(Host):
    """float16 weights with float32 masters."""

    CAN = Host.CAN - {"clip by hand"}  # torch's norm of float16 gradients ends at 65504
    sums, half_weights = np.float16, True
    dtype = torch.float16
    make = staticmethod(lambda params: MasterWeights(torch.optim.SGD, params, lr=1.0))

    def weights(self):
        halves = [self.params[n].detach() for n in self.names]
        for half, master in zip(halves, self.optimizer.masters, strict=True):
            most = torch.finfo(torch.float16).max
            assert torch.equal(half, master.clamp(-most, most).half())
        return dict(zip(self.names, (m.detach().numpy() for m in self.optimizer.masters)))


class DeviceMasters(Masters):
    device_path = True
    LIMITS = [{}]


class AdamMasters(Masters):
    CLIPS = (2.0**30,)
    make = staticmethod(lambda params: MasterWeights(torch.optim.Adam, params, lr=0.1))

    @classmethod
    def mover(cls, sizes):
        return Plain(lambda params: torch.optim.Adam(params, lr=0.1, fused=True), sizes)


DRIVERS = [
    *(Host, Momentum, Fused, Device, DeviceFused, DeviceMomentum),
    *(Masters, DeviceMasters, AdamMasters),
]
MACHINES = [machine_for(Driver) for Driver in DRIVERS]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_any_order(machine):
    any_order(machine, 20)
