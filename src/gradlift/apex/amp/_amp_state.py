"""`apex.amp._amp_state`: what scripts import to read the scale, or to set it.

>>> import torch
>>> from gradlift.apex import amp
>>> from gradlift.apex.amp._amp_state import _amp_state
>>> model = amp.initialize(torch.nn.Linear(2, 1), opt_level="O1")
>>> _amp_state.loss_scalers[0]._loss_scale = 2**20
>>> amp.state_dict()
{'loss_scaler0': {'loss_scale': 1048576.0, 'unskipped': 0}}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..session import AMP

_amp_state = AMP


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints, unless `verbosity=0` was given; only on the first rank with `rank0`.

    >>> maybe_print("a line of the script", rank0=True)
    a line of the script
    """
    import torch.distributed as dist

    other = dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
    if AMP.verbosity > 0 and not (rank0 and other):
        print(msg, flush=True)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The float32 weights that `optimizer` steps, with true gradients after `scale_loss`.

    >>> import torch
    >>> from gradlift.apex import amp
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    >>> [p.dtype for p in master_params(optimizer)]
    [torch.float32, torch.float32]
    """
    guard = getattr(optimizer, "_amp_guard", None)
    if guard is None:  # disabled
        return (p for group in optimizer.param_groups for p in group["params"])
    guard.settle()
    return iter(guard.weights())
