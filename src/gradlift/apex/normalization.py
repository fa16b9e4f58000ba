"""`apex.normalization`, as far as torch has the same: `FusedLayerNorm`.

>>> FusedLayerNorm(4).normalized_shape
(4,)
"""

from torch.nn import LayerNorm as FusedLayerNorm

__all__ = ["FusedLayerNorm"]
