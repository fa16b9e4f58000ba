"""Findings: each a small pure function, run -> Finding or None, with a fixed kind."""

from .finding import SEVERITIES, Check, Finding
from .loss import forward_nan, half_loss
from .overflow import culprit, exploding, floor, overflows, start, thrash
from .ranks import ranks
from .settings import lr_moved, odd_scale
from .underflow import conservative, dead_layer, underflow
from .weights import weight_range, weights_nonfinite

CHECKS: tuple[Check, ...] = (
    ranks,
    weights_nonfinite,
    forward_nan,
    floor,
    exploding,
    thrash,
    culprit,
    overflows,
    start,
    dead_layer,
    underflow,
    half_loss,
    weight_range,
    lr_moved,
    conservative,
    odd_scale,
)
"""Within one severity findings have this order: causes before their consequences."""

EXPLAINS: dict[str, tuple[str, ...]] = {
    "weights-nonfinite": ("forward-nan", "floor", "thrash", "culprit", "overflows"),
    "floor": ("start", "thrash", "culprit", "overflows"),
    "exploding": ("thrash", "culprit", "overflows"),
    "thrash": ("culprit", "overflows"),
    "culprit": ("overflows",),
}
"""Findings that a finding makes redundant: `thrash` already names the first culprit."""

__all__ = ["CHECKS", "EXPLAINS", "SEVERITIES", "Check", "Finding"]
