"""`apex.normalization` over torch's layer norm and RMS norm. No kernel of apex's is in it.

>>> FusedLayerNorm(4).normalized_shape
(4,)
"""

from .fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
