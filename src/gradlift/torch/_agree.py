"""One small collective a step, so that every rank takes the same decision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..reading import NAN, Reading


def alone() -> bool:
    """Is this process the whole job? Only then may it trust its own loss without asking."""
    return world_size(None) == 1


def world_size(group: Any) -> int:
    """How many ranks there are, in a group or in all."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def agree(reading: Reading, group: Any, device: torch.device) -> Reading:
    """The reading of all ranks: gathered and combined here, since a MAX may lose a NaN."""
    probe = -1.0 if reading.probe_amax is NAN else reading.probe_amax  # NaN enters no reduction
    mine = [reading.nonfinite, reading.loss_nonfinite, reading.checked, reading.amax, probe]
    if any(isinstance(x, torch.Tensor) for x in mine):
        packed = torch.stack([torch.as_tensor(x, device=device).float() for x in mine])
    else:
        packed = torch.tensor([float(x) for x in mine], device=device)
    everyone = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, packed, group=group)
    table = torch.stack(everyone)
    nonfinite, dead, checked, amax, probe = table.amax(0)
    if device.type == "cpu":
        return reading._replace(
            nonfinite=nonfinite.item() > 0,
            loss_nonfinite=dead.item() > 0,
            checked=checked.item() > 0,
            amax=amax.item(),
            probe_amax=probe.item() if probe >= 0 else NAN,
        )
    return reading._replace(
        nonfinite=nonfinite > 0,
        loss_nonfinite=dead > 0,
        checked=checked > 0,
        amax=amax,
        probe_amax=torch.where(probe < 0, NAN, probe),
    )
