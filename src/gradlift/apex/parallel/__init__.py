"""`apex.parallel`, as far as torch has the same: `DistributedDataParallel` and SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import SettingsError, warn
from .LARC import LARC

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

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
    """torch's own, called as apex's is. What only tuned apex's speed is accepted and ignored.

    So is `gradient_predivide_factor`: gradients are averaged, whatever it is. With
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
        if not gradient_average:
            raise SettingsError("gradient_average=False: torch's DistributedDataParallel averages")
        unknown = {*speed} - _SPEED_ONLY
        if unknown:
            raise SettingsError(f"DistributedDataParallel has no argument {', '.join(unknown)}")
        if allreduce_always_fp32:
            warn("allreduce_always_fp32 is ignored: gradients keep their type")
        super().__init__(module, find_unused_parameters=delay_allreduce)


class Reducer:
    """There to be imported, and refused when it is made.

    >>> Reducer(nn.Linear(1, 1))
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: apex's Reducer is not here: use torch.distributed.all_reduce
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise SettingsError("apex's Reducer is not here: use torch.distributed.all_reduce")


def create_syncbn_process_group(group_size: int) -> Any:
    """The group of `group_size` neighbouring ranks that this one is in; None, all ranks, for 0.

    >>> create_syncbn_process_group(0) is None
    True
    """
    return torch.distributed.new_subgroups(group_size)[0] if group_size else None


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """torch's SyncBatchNorm in the place of every batch norm; `channel_last` is not used.

    >>> convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)))[0].__class__.__name__
    'SyncBatchNorm'
    """
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
