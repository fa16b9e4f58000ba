"""One short training run on a device and on the CPU, for the selftest to compare.

Gradients are powers of two, so a reading is the same number on every device and scales must agree
to the bit. On the CPU itself the accelerator's path is taken by force and compared with the usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core import StepResult
from ..torch.scaler.grad_scaler import GradScaler

CPU = torch.device("cpu")
RULES = ("dynamic:growth_interval=3", "auto", "megatron:growth_interval=3,init_scale=2^16")
HUGE = 2.0**120  # a gradient that every scale of the story carries out of float32
# Good steps, overflows, a NaN loss, a non-finite gradient that somebody else made.
STORY: tuple[float | str, ...] = (
    *(1.0, 2.0, HUGE, 0.5, "nan loss", 0.5, "inf", "nan"),
    *(0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, HUGE, HUGE, 1.0),
)


class NotApplicable(Exception):
    """This device has nothing to check here; the text says why."""


def same(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise AssertionError(f"{what}: {got}, on the CPU {expected}")


def close(what: str, got: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    worst = ((got - expected).abs() / expected.abs().clamp(min=1e-6)).max().item()
    if not worst <= rtol:
        raise AssertionError(f"{what}: relative difference {worst:.2g}, expected at most {rtol:g}")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = torch.nn.Parameter(torch.ones(5, 7))
        self.above = torch.nn.Parameter(torch.ones(7))

    def forward(self, factor: float) -> Tensor:
        return (self.below * factor).sum() + (self.above * (factor / 2)).sum()


def scaler_on(device: torch.device, *, reference: bool = False, **settings: Any) -> GradScaler:
    """A scaler that takes the accelerator's path; `reference`: the CPU's own."""
    scaler = GradScaler(device.type, **settings)
    scaler._force_device_path = device.type == "cpu" and not reference
    return scaler


class Setup:
    """Model, optimizer and scaler on a device; `reference` is the CPU's own path."""

    def __init__(self, device: torch.device, optimizer: Callable[..., Any], **settings: Any):
        self.net = Net().to(device)
        self.optimizer = optimizer(self.net.parameters())
        self.scaler = scaler_on(device, names=self.net, **settings)

    def backward(self, what: float | str) -> None:
        self.optimizer.zero_grad()
        loss = self.net(what if isinstance(what, float) else 1.0)
        self.scaler.scale(loss * math.nan if what == "nan loss" else loss).backward()
        if what in ("inf", "nan"):
            assert self.net.below.grad is not None
            self.net.below.grad[-1] = float(what)

    def finish(self, **how: Any) -> StepResult:
        self.scaler.step(self.optimizer, **how)
        self.scaler.update()
        result = self.scaler.result
        assert result is not None
        return result

    def step(self, what: float | str, **how: Any) -> dict[str, Any]:
        """All that a user can see of one step."""
        self.backward(what)
        before = [p.detach().clone() for p in self.net.parameters()]
        result = self.finish(**how)
        if not result.stepped:
            untouched = all(map(torch.equal, before, self.net.parameters()))
            assert untouched, f"a refused step ({result.cause}) moved the weights"
        return {
            "stepped": result.stepped,
            "cause": result.cause.name,
            "scale": result.scale,
            "culprits": [getattr(c, "described", c) for c in result.culprits],
            "next scale": self.scaler.get_scale(),
            "skipped": self.scaler.skipped_steps,
        }


def optimizer_of(name: str, fused: bool, params: Any) -> torch.optim.Optimizer:
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(
            params, lr=2.0**-6, fused=fused, **momentum
        )
    except RuntimeError as error:
        raise NotApplicable(f"torch: {str(error).splitlines()[0]}") from None
    return made


def both(device: torch.device) -> tuple[Setup, Setup]:
    """The same on the device and on the CPU."""
    return Setup(device, PLAIN), Setup(CPU, PLAIN, reference=True)


FUSED = partial(optimizer_of, "AdamW", True)
PLAIN = partial(optimizer_of, "SGD", False)
