"""Findings: each a small pure function, run -> Finding or None, with a fixed kind."""

from ._finding import SEVERITIES, Check, Finding
from ._loss import forward_nan, half_loss
from ._overflow import culprit, exploding, floor, overflows, start, thrash
from ._ranks import ranks
from ._settings import lr_moved, odd_scale
from ._underflow import conservative, dead_layer, underflow

CHECKS: tuple[Check, ...] = (
    ranks,
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
    lr_moved,
    conservative,
    odd_scale,
)
"""Within one severity findings are told in this order: causes before what they bring about."""

EXPLAINS: dict[str, tuple[str, ...]] = {
    "floor": ("start", "thrash", "culprit", "overflows"),
    "exploding": ("thrash", "culprit", "overflows"),
    "thrash": ("culprit", "overflows"),
    "culprit": ("overflows",),
}
"""A finding makes others redundant: who leads the overflows of a scale that thrashes is told
there."""

__all__ = ["CHECKS", "EXPLAINS", "SEVERITIES", "Check", "Finding"]
