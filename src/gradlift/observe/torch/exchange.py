"""gradlift's scaler wherever torch's is asked for: what `--rule` needs, and nothing else does."""

from __future__ import annotations

from typing import Any

import torch

from ...torch.scaler.grad_scaler import GradScaler
from ..patches import Patches


def exchange(patches: Patches) -> None:
    """`torch.amp.GradScaler`, and its kin, are gradlift's from now on, until `patches.restore()`.

    Each records to the current run and takes that run's rule; scales and factors that a script
    gives are left out of account.
    """
    homes: dict[str, Any] = {"": torch.amp, "cuda": torch.cuda.amp, "cpu": torch.cpu.amp}
    for device, original in [(device, home.GradScaler) for device, home in homes.items()]:
        _put(patches, _exchanged(original, device), original)
    if torch.distributed.is_available():
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        _put(patches, _sharded(ShardedGradScaler), ShardedGradScaler)


def _put(patches: Patches, kind: type[GradScaler], original: type) -> None:
    """Under the original's name and address, so that instances can be pickled."""
    kind.__module__, kind.__name__ = original.__module__, original.__name__
    kind.__qualname__ = original.__qualname__
    patches.everywhere(original.__name__, original, kind)


def _exchanged(original: type, device: str) -> type[GradScaler]:
    class Exchanged(GradScaler):
        __doc__ = original.__doc__

        def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
            given = (device, *args) if device else args
            where = kwargs.get("device", given[0] if given else "cuda")
            if len(given) > 5:
                enabled = given[5]
            # torch lets float16 parameters pass, so a script may have them
            super().__init__(where, enabled=enabled, allow_fp16_params=True)

    return Exchanged


def _sharded(original: type) -> type[GradScaler]:
    """FSDP1's: all ranks of its group decide together."""

    class Sharded(GradScaler):
        __doc__ = original.__doc__

        def __init__(
            self,
            device: str = "cuda",
            init_scale: float = 2.0**16,
            backoff_factor: float = 0.5,
            growth_factor: float = 2.0,
            growth_interval: int = 2000,
            enabled: bool = True,
            process_group: Any = None,
        ) -> None:
            if process_group is None and torch.distributed.is_initialized():
                process_group = torch.distributed.group.WORLD
            given = {"process_group": process_group, "allow_fp16_params": True}
            super().__init__(device, enabled=enabled, **given)

    return Sharded
