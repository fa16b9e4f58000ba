"""Findings: each a small pure function, run -> Finding or None, with a fixed kind."""

from .calls import (
    accumulation_not_divided,
    autocast_no_scaler,
    clip_scaled,
    clipped_by_hand,
    gan_two_updates,
    loss_not_scaled,
    penalty_scaled,
    resume_without_scaler,
    step_beside_scaler,
    step_twice,
    unscale_missing,
    update_missing,
    update_twice,
    zero_grad_misplaced,
    zero_grad_missing,
)
from .course import diverging, spike, vanishing
from .ending import crash, empty_run, killed
from .finding import SEVERITIES, Check, Finding
from .forward import dead_relu, exploding_forward, near_overflow
from .logs import (
    hysteresis,
    nan_applied,
    norm_nonfinite,
    norm_rising,
    overflows_hidden,
    resume_lost_scale,
    scale_falls,
)
from .loss import forward_nan, half_loss
from .origin import (
    bad_data,
    bad_operation,
    custom_backward,
    forward_overflow,
    half_sum,
    labels_masked,
    masked_rows,
    one_sample_norm,
    poisoned_buffer,
    zero_probability,
)
from .overflow import culprit, exploding, floor, overflows, start, thrash
from .ranks import ranks
from .settings import growth_eager, lr_moved, odd_scale, static_misfit
from .trained import alike, detached, head_replaced, parameters_left_out, parameters_shared
from .underflow import conservative, dead_layer, underflow
from .weights import (
    clip_too_tight,
    decay_wins,
    eps_swallows,
    eps_zero,
    fp16_parameters,
    updates_lost,
    weight_range,
    weights_nonfinite,
)

CHECKS: tuple[Check, ...] = (
    # what the script does
    update_missing,
    update_twice,
    clip_scaled,
    clipped_by_hand,
    unscale_missing,
    step_beside_scaler,
    step_twice,
    zero_grad_missing,
    zero_grad_misplaced,
    loss_not_scaled,
    penalty_scaled,
    resume_without_scaler,
    gan_two_updates,
    parameters_shared,
    head_replaced,
    autocast_no_scaler,
    ranks,
    # data and numbers
    eps_zero,
    updates_lost,
    fp16_parameters,
    bad_data,
    poisoned_buffer,
    masked_rows,
    labels_masked,
    one_sample_norm,
    zero_probability,
    custom_backward,
    accumulation_not_divided,
    diverging,
    half_sum,
    exploding_forward,
    forward_overflow,
    bad_operation,
    weights_nonfinite,
    # settings
    growth_eager,
    static_misfit,
    clip_too_tight,
    decay_wins,
    eps_swallows,
    # layers
    alike,
    dead_relu,
    detached,
    parameters_left_out,
    # logs of other trainers
    resume_lost_scale,
    nan_applied,
    # symptoms
    half_loss,
    forward_nan,
    floor,
    norm_nonfinite,
    scale_falls,
    exploding,
    thrash,
    culprit,
    overflows,
    lr_moved,
    start,
    conservative,
    vanishing,
    dead_layer,
    underflow,
    near_overflow,
    weight_range,
    odd_scale,
    norm_rising,
    hysteresis,
    overflows_hidden,
    spike,
    crash,
    empty_run,
    killed,
)
"""Within one severity findings have this order: causes before their consequences."""

_SYMPTOMS = ("forward-nan", "floor", "thrash", "culprit", "overflows", "exploding", "start")
_NONFINITE = ("weights-nonfinite", "poisoned-buffer", "bad-operation", *_SYMPTOMS)
_LOST = ("diverging", "forward-overflow", "half-loss", *_NONFINITE)
_LAYERS = ("dead-layer", "detached-layer", "dead-relu", "underflow", "vanishing", "conservative")
_ORIGINS = (
    *("bad-data", "poisoned-buffer", "masked-rows", "labels-masked", "one-sample-norm"),
    *("zero-probability", "forward-overflow", "custom-backward"),
)
EXPLAINS: dict[str, tuple[str, ...]] = {
    "clip-scaled": ("clip-too-tight", *_LAYERS),
    "step-beside-scaler": _LOST,
    "step-twice": _LOST,
    "zero-grad-missing": _LOST,
    "zero-grad-misplaced": _LAYERS,
    "update-missing": ("crash", "accumulation-not-divided"),
    "update-twice": ("crash", "lr-moved", *_SYMPTOMS),
    "loss-not-scaled": _LAYERS,
    "resume-without-scaler": ("start", "overflows", "lr-moved"),
    "gan-two-updates": ("thrash",),
    "parameters-shared": _LOST,
    "head-replaced": ("parameters-left-out", *_LAYERS),
    "autocast-no-scaler": _LAYERS,
    **dict.fromkeys(_ORIGINS, ("bad-operation", "diverging", "half-loss", *_NONFINITE)),
    "eps-zero": ("fp16-parameters", "updates-lost", "forward-overflow", *_NONFINITE),
    "accumulation-not-divided": _LOST,
    "diverging": ("forward-overflow", "half-loss", *_NONFINITE),
    "half-loss": ("dead-layer", "bad-operation", *_SYMPTOMS),
    "exploding": ("forward-overflow", "thrash", "culprit", "overflows"),
    "bad-operation": ("weights-nonfinite", *_SYMPTOMS),
    "updates-lost": ("fp16-parameters", "eps-swallows"),
    "fp16-parameters": ("forward-overflow", "diverging", *_NONFINITE),
    "weights-nonfinite": ("bad-operation", *_SYMPTOMS),
    "growth-eager": ("thrash", "culprit", "overflows", "start"),
    "zero-init": _LAYERS,
    "dead-relu": _LAYERS,
    "detached-layer": ("dead-layer",),
    "conservative": ("underflow", "dead-layer"),
    "vanishing": ("underflow", "dead-layer"),
    "nan-applied": ("forward-nan", "norm-nonfinite", "norm-rising"),
    "forward-nan": ("norm-nonfinite",),
    "scale-falls": ("overflows", "hysteresis"),
    "floor": ("start", "exploding", "thrash", "culprit", "overflows", "scale-falls", "hysteresis"),
    "ranks": (*_NONFINITE, "diverging"),
    "static-misfit": (
        "conservative",
        "underflow",
        "dead-layer",
        "floor",
        "culprit",
        "overflows",
        "start",
        "thrash",
    ),
    "thrash": ("culprit", "overflows"),
    "culprit": ("overflows",),
}
"""Findings that a finding makes redundant: `thrash` already names the first culprit."""

__all__ = ["CHECKS", "EXPLAINS", "SEVERITIES", "Check", "Finding"]
