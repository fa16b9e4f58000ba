"""torch: the host path, the device path (forced on the CPU), masters."""

import math
import tempfile
from pathlib import Path

import torch

from gradlift.torch import GradScaler, MasterWeights, half_model

from .lives import BAD


class Host:
    """AdamW under torch's own rule; the scale grows twice and falls once in a run."""

    lag = 0
    on_device = False

    def __init__(self, journal):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        self.optimizer = self.made()
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3, journal=journal)
        self.scaler._force_device_path = self.on_device

    @classmethod
    def warm(cls):
        """A step, since what the first one imports takes seconds. On a CPU torch can be forked
        after it."""
        training = cls(None)
        training.step(0, lambda what: None)
        with tempfile.TemporaryDirectory() as folder:
            training.save(Path(folder))
            training.load(Path(folder))

    def made(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def output(self, x):
        with torch.autocast("cpu", torch.float16):
            return self.model(x)

    def step(self, n, mark):
        mark("forward and backward")
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(n))
        loss = self.output(x).float().square().mean()
        loss = loss * (1e30 if n == BAD[0] else math.nan if n == BAD[1] else 1.0)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        mark("scaler.step")
        self.scaler.step(self.optimizer, max_norm=1.0)
        mark("scaler.update")
        self.scaler.update()

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def save(self, folder):
        held = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save(held, folder / "all.pt")

    def load(self, folder):
        held = torch.load(folder / "all.pt", weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(held[name])

    def state(self):
        yield from _leaves({name: part.state_dict() for name, part in self.parts().items()})


class Device(Host):
    """The accelerator's path, on CPU tensors: fused, and read one step later."""

    lag = 1
    on_device = True

    def made(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)


class Masters(Host):
    """Float16 weights and their float32 masters."""

    def made(self):
        half_model(self.model, torch.float16)
        return MasterWeights(torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def output(self, x):
        return self.model(x.half())


def _leaves(held):
    """Tensors as arrays, anything else as text."""
    if isinstance(held, dict):
        for key in held:
            yield from _leaves(held[key])
    elif isinstance(held, (list, tuple)):
        for x in held:
            yield from _leaves(x)
    elif isinstance(held, torch.Tensor):
        yield held.detach().contiguous().numpy()
    else:
        yield str(held)


RUNS = {"torch, host": Host, "torch, device path": Device, "torch, masters": Masters}
