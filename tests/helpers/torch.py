"""What the tests of gradlift.torch share."""

import math
from itertools import pairwise

import pytest
import torch

from gradlift.torch import GradScaler


def net(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


def bits(held):
    """Values to the bit, so that -0.0 and NaN count for what they are, as text.

    Of a tensor, of a module's parameters, of whatever a container holds.
    """
    if isinstance(held, torch.nn.Module):
        return [bits(p) for p in held.parameters()]
    if isinstance(held, dict):
        return {key: bits(x) for key, x in held.items()}
    if isinstance(held, (list, tuple)):
        return [bits(x) for x in held]
    if not isinstance(held, torch.Tensor):
        return held
    dense = (held.to_dense() if held.is_sparse else held).detach().contiguous().flatten()
    return f"{held.dtype} {dense.view(torch.uint8).numpy().tobytes().hex()}"


def half_loss(model, x, times=1.0):
    """A loss through float16 activations, so that gradients overflow as they really do."""
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return out.float().square().mean() * times


def train(scaler, model, optimizer, losses, **step):
    results = []
    for loss in losses:
        optimizer.zero_grad()
        scaler.scale(loss(model)).backward()
        scaler.step(optimizer, **step)
        scaler.update()
        results.append(scaler.result)
    return results


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def good(model):
    return half_loss(model, X)


def value(model):
    with torch.no_grad():
        return float(good(model))


def nan_loss(model):
    return half_loss(model, X) * math.nan


def exploding(model):
    return half_loss(model, X, times=1e30)


both_paths = pytest.mark.parametrize("device_path", [False, True])


def made(device_path=False, fused=False, size=1, **settings):
    w = torch.nn.Parameter(torch.zeros(size))
    scaler = GradScaler("cpu", **settings)
    scaler._force_device_path = device_path
    return w, torch.optim.SGD([w], lr=1.0, fused=fused), scaler


def step(w, optimizer, scaler, slope=1.0, **options):
    optimizer.zero_grad()
    scaler.scale((w * slope).sum()).backward()
    scaler.step(optimizer, **options)
    scaler.update()


OVERFLOW = 1e38  # times any scale from 2^2 on
