"""Rules by name. The rule of each peer (another library) is a row of data."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from ..errors import SettingsError
from .backoff import Backoff, LateBackoff, WideningBackoff
from .base import LARGEST, SMALLEST, Rule
from .fixed import Off, Static
from .headroom import Headroom

_UNBOUNDED = {"min_scale": SMALLEST, "max_scale": LARGEST}
_FLOOR_1 = {"min_scale": 1.0, "max_scale": LARGEST}

PRESETS: dict[str, tuple[type[Rule], dict[str, Any]]] = {
    # ours
    "dynamic": (Backoff, {}),
    "auto": (Headroom, {}),
    "auto:cautious": (Headroom, {"margin_bits": 2, "hold_bits": 4, "leak": 256, "explore": 24}),
    # peers: each has exactly the numbers, bounds and timing of the original
    "torch": (Backoff, _UNBOUNDED),
    "apex": (Backoff, {"min_scale": SMALLEST, "max_scale": 2.0**24}),
    "apex-fp16": (Backoff, {**_FLOOR_1, "init_scale": 2.0**32, "growth_interval": 1000}),
    "tf.keras": (Backoff, {**_FLOOR_1, "init_scale": 2.0**15}),
    "keras": (Backoff, {**_UNBOUNDED, "init_scale": 2.0**15}),
    "mxnet": (LateBackoff, {"min_scale": SMALLEST, "max_scale": 2.0**24}),
    "jmp": (Backoff, {**_FLOOR_1, "init_scale": 2.0**15}),
    "flax": (Backoff, {**_UNBOUNDED, "growth_late": "every"}),
    "mpx": (
        Backoff,
        {"init_scale": 2.0**15, "min_scale": 1.0, "max_scale": 65504.0, "powers_of_two": False},
    ),
    "deepspeed": (
        Backoff,
        {**_FLOOR_1, "growth_interval": 1000, "hysteresis": 2, "growth_late": "first"},
    ),
    "megatron": (
        Backoff,
        {**_FLOOR_1, "init_scale": 2.0**32, "growth_interval": 1000, "hysteresis": 2},
    ),
    "nemo": (Backoff, {**_UNBOUNDED, "hysteresis_refill": "clean"}),
    "fairseq": (
        Backoff,
        # Stops when the scale would be 1e-4 or less: 2^-13 is the smallest that is used.
        {
            "init_scale": 2.0**7,
            "growth_interval": 2**14,
            "min_scale": 2.0**-13,
            "max_scale": LARGEST,
        },
    ),
    "metaseq": (
        WideningBackoff,
        {"init_scale": 4.0, "growth_interval": 256, "min_scale": 2.0**-5, "max_scale": LARGEST},
    ),
    "colossalai": (
        Backoff,
        {"growth_interval": 1000, "hysteresis": 2, "min_scale": 1.0, "max_scale": 2.0**32},
    ),
    "paddle": (Backoff, {**_UNBOUNDED, "hysteresis_refill": "streak"}),
    "mindspore": (Backoff, {**_FLOOR_1, "init_scale": 2.0**24}),
    "modulus": (
        Backoff,
        {
            "min_scale": SMALLEST,
            "max_scale": 2.0**30,
            "recover_below": 2.0**6,
            "recover_interval": 100,
        },
    ),
    "verl": (Backoff, {**_UNBOUNDED, "growth_interval": 400}),
    "openseq2seq": (Backoff, {"init_scale": 2.0**14, "min_scale": 1.0, "max_scale": 2.0**14}),
}

_CLASSES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Off, Static, Backoff, LateBackoff, WideningBackoff, Headroom)
}


def preset(name: str, **overrides: Any) -> Rule:
    """The rule called `name` (a key of `PRESETS`, or a rule's own name), with settings replaced.

    >>> preset("megatron", hysteresis=4).hysteresis
    4
    >>> preset("torhc")
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: no rule is called 'torhc'; did you mean 'torch'?
    """
    if name in PRESETS:
        rule, settings = PRESETS[name]
    elif name in _CLASSES:
        rule, settings = _CLASSES[name], {}
    else:
        names = [*PRESETS, *_CLASSES]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise SettingsError(f"no rule is called {name!r}; {hint}")
    known = [f.name for f in dataclasses.fields(rule)]  # type: ignore[arg-type]
    for given in overrides:
        if given not in known:
            raise SettingsError(
                f"the rule {name!r} has no setting {given!r}; it has {', '.join(known) or 'none'}"
            )
    return rule(**{**settings, **overrides})
