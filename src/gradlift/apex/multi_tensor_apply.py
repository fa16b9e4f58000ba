"""`apex.multi_tensor_apply`: its kernels are not here, as on an apex without them.

>>> multi_tensor_applier.available
False
"""

from __future__ import annotations

from typing import Any

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Scripts ask whether it is `available` before they call it.

    >>> MultiTensorApply(2048 * 32)(None, None, [])
    Traceback (most recent call last):
        ...
    RuntimeError: apex's kernels are not here: multi_tensor_applier.available is False
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError("apex's kernels are not here: multi_tensor_applier.available is False")


multi_tensor_applier = MultiTensorApply(2048 * 32)
