"""One small collective a step, so that every rank takes the same decision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..reading import Reading


def alone() -> bool:
    """Is this process the whole job? Only then may it trust its own loss without asking."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def agree(reading: Reading, group: Any, device: torch.device) -> Reading:
    """The reading of all ranks: gathered and combined here, since a MAX may lose a NaN."""
    mine = [reading.nonfinite, reading.loss_nonfinite, reading.checked, reading.amax]
    if any(isinstance(x, torch.Tensor) for x in mine):
        packed = torch.stack([torch.as_tensor(x, device=device).float() for x in mine])
    else:
        packed = torch.tensor([float(x) for x in mine], device=device)
    everyone = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, packed, group=group)
    table = torch.stack(everyone)
    flags, amax = table[:, :3].amax(0) > 0, table[:, 3].amax()
    if device.type == "cpu":
        nonfinite, dead, checked = flags.tolist()
        return reading._replace(
            nonfinite=nonfinite, loss_nonfinite=dead, checked=checked, amax=amax.item()
        )
    return reading._replace(
        nonfinite=flags[0], loss_nonfinite=flags[1], checked=flags[2], amax=amax
    )
