"""`apex.parallel`, as far as torch has the same: `DistributedDataParallel` and SyncBatchNorm."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import SettingsError, warn

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]

SyncBatchNorm = nn.SyncBatchNorm

_SPEED_ONLY = {
    "message_size",
    "shared_param",
    "allreduce_trigger_params",
    "retain_allreduce_buffers",
    "num_allreduce_streams",
    "allreduce_communicators",
    "gradient_average_split_factor",
    "prof",
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's own, called as apex's is. What only tuned apex's speed is accepted and ignored; with
    `delay_allreduce` some parameters may stay without gradients.

    >>> DistributedDataParallel(nn.Linear(1, 1), gradient_average=False)
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: gradient_average=False: torch's DistributedDataParallel averages
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        *,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        allreduce_always_fp32: bool = False,
        **speed: Any,
    ) -> None:
        asked = {
            "gradient_average": (gradient_average, True),
            "gradient_predivide_factor": (gradient_predivide_factor, 1.0),
        }
        for name, (given, done) in asked.items():
            if given != done:
                raise SettingsError(f"{name}={given}: torch's DistributedDataParallel averages")
        unknown = {*speed} - _SPEED_ONLY
        if unknown:
            raise SettingsError(f"DistributedDataParallel has no argument {', '.join(unknown)}")
        if allreduce_always_fp32:
            warn("allreduce_always_fp32 is ignored: gradients keep their type")
        super().__init__(module, find_unused_parameters=delay_allreduce)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """
    >>> convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)))[0].__class__.__name__
    'SyncBatchNorm'
    """
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
