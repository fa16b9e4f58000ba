"""O0 to O3 as data, what may be overridden, and the rule that apex's scale arguments name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..errors import SettingsError, warn
from ..rules import Backoff, Rule, Static, preset
from ..rules.base import LARGEST, SMALLEST, is_power_of_two


@dataclasses.dataclass(frozen=True)
class Level:
    """What an optimization level stands for; the names are apex's.

    >>> LEVELS["O2"].master_weights, LEVELS["O3"].loss_scale
    (True, 1.0)
    """

    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    opt_level: str = ""

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit type that the model's weights get, if they do."""
        kind = self.cast_model_type
        return kind if kind in (torch.float16, torch.bfloat16) else None


LEVELS = {
    "O0": Level(torch.float32, False, None, False, 1.0),
    "O1": Level(None, True, None, None, "dynamic"),
    "O2": Level(torch.float16, False, True, True, "dynamic"),
    "O3": Level(torch.float16, False, False, False, 1.0),
}


def level(opt_level: str, **overrides: Any) -> Level:
    """The level of that name; what is not None replaces its own setting.

    >>> level("O2", keep_batchnorm_fp32="False", loss_scale="128.0", master_weights=None)
    Level(cast_model_type=torch.float16, patch_torch_functions=False, keep_batchnorm_fp32=False, \
master_weights=True, loss_scale=128.0, opt_level='O2')
    """
    if opt_level not in LEVELS:
        raise SettingsError(f"opt_level is {opt_level!r}, expected the letter O and 0, 1, 2 or 3")
    given = {name: value for name, value in overrides.items() if value is not None}
    if opt_level == "O1":
        _check_o1(given)
    elif given.get("patch_torch_functions"):
        raise SettingsError(f"patch_torch_functions=True belongs to 'O1', not to {opt_level!r}")
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if name in given:
            given[name] = _flag(name, given[name])
    if given.get("cast_model_type") is False:
        given["cast_model_type"] = None
    if "loss_scale" in given:
        given["loss_scale"] = _loss_scale(given["loss_scale"])
    return dataclasses.replace(LEVELS[opt_level], opt_level=opt_level, **given)


def _check_o1(given: dict[str, Any]) -> None:
    if given.get("cast_model_type") in (False, torch.float32):
        del given["cast_model_type"]
    for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
        if name in given:
            raise SettingsError(
                f"{name} is {given[name]!r}, but with opt_level='O1' weights and batch norms stay "
                "in float32: leave it out, or take 'O2'"
            )


def _flag(name: str, value: Any) -> bool:
    if value in ("True", "False"):  # as argparse may hand it over
        return bool(value == "True")
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}, expected True or False")
    return value


def _loss_scale(value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SettingsError(f"loss_scale is {value!r}, expected 'dynamic' or a number") from None


def scale_rule(
    loss_scale: float | str,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    name: str = "apex",
    **settings: Any,
) -> Rule:
    """apex's own rule within these bounds, or a constant; `name` is the preset of the former.

    >>> scale_rule(128.0)
    Static(scale=128.0)
    >>> scale_rule("dynamic", min_loss_scale=1.0).min_scale
    1.0
    """
    if not isinstance(loss_scale, str):
        if _check(loss_scale=loss_scale):
            return Static(loss_scale)
        return Backoff(
            init_scale=loss_scale, min_scale=loss_scale, max_scale=loss_scale, powers_of_two=False
        )
    low = SMALLEST if min_loss_scale is None else float(min_loss_scale)
    high = LARGEST if max_loss_scale is None else float(max_loss_scale)
    start = min(max(settings.pop("init_scale", preset(name).init().scale), low), high)
    factors = {key: value for key, value in settings.items() if key != "growth_interval"}
    factors |= {} if start in (low, high) else {"init_scale": start}
    settings["powers_of_two"] = _check(min_loss_scale=low, max_loss_scale=high, **factors)
    return preset(name, init_scale=start, min_scale=low, max_scale=high, **settings)


def _check(**numbers: float) -> bool:
    """Are all of them powers of two? Warns of each that is not."""
    odd = {name: value for name, value in numbers.items() if not is_power_of_two(value)}
    for name, value in odd.items():
        warn(
            f"{name} is {value!r}, not a power of two, so every gradient is rounded once more when "
            "it is unscaled"
        )
    return not odd
