"""`amp`, under apex's names: `initialize`, `scale_loss`, `master_params`, `state_dict`.

>>> import torch
>>> from gradlift.apex import amp  # was: from apex import amp
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
>>> loss = model(torch.ones(1, 2)).mean() / 4
>>> with amp.scale_loss(loss, optimizer) as scaled_loss:
...     scaled_loss.backward()
>>> norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
>>> optimizer.step()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MisuseError
from ...journal import JournalLike
from ...rules import Rule
from .. import saved_state as _state
from ..casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ..function_casts import AmpHandle, init
from ..guard import begin, end, give_up, guard_of, settle_all
from ..opt_levels import level, scale_rule
from ..preparation import check_models, check_optimizers, prepared_models, prepared_optimizers
from ..session import AMP, make_scaler
from ._amp_state import _amp_state as _amp_state
from ._amp_state import master_params

__all__ = [
    "initialize",
    "init",
    "scale_loss",
    "master_params",
    "state_dict",
    "load_state_dict",
    "disable_casts",
    "half_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_float_function",
    "register_promote_function",
]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    rule: Rule | str | float | None = None,
    journal: JournalLike | None = None,
) -> Any:
    """Prepares models and optimizers for mixed precision; returns them as they came, one or a list.

    | `opt_level` | weights | forward | scale |
    |---|---|---|---|
    | "O0" | float32 | float32 | 1 |
    | "O1" | float32 | float16 autocast | dynamic |
    | "O2" | float16, float32 masters, batch norms float32 | as the weights | dynamic |
    | "O3" | float16 | float16 | 1 |

    The next arguments override a level's settings, as in apex. Two are gradlift's: `rule`, any
    rule or its text instead of apex's, and `journal`, to record to.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> model, [optimizer] = initialize(model, [optimizer], opt_level="O2", rule="auto")
    >>> model.weight.dtype
    torch.float16
    """
    settle_all()
    if not enabled:
        AMP.begin(verbosity=verbosity)
        return models if optimizers is None else (models, optimizers)
    chosen = level(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    if rule is not None and loss_scale not in (None, "dynamic"):
        raise MisuseError(f"rule={str(rule)!r} and loss_scale={loss_scale!r}: pass one of them")
    nets = [models] if isinstance(models, nn.Module) else _listed(models)
    given = [] if optimizers is None else _listed(optimizers)
    check_models(nets)
    check_optimizers(given)
    own = scale_rule(chosen.loss_scale, min_loss_scale, max_loss_scale) if rule is None else None
    device = next((p.device.type for net in nets for p in net.parameters()), "cpu")
    scaler = make_scaler(device, own or rule, journal)

    ready = prepared_optimizers(
        given, chosen, convert=lambda: prepared_models(nets, chosen, cast_model_outputs)
    )
    AMP.begin(
        scaler=scaler,
        own_rule=own,
        num_losses=num_losses,
        verbosity=verbosity,
        casts=chosen.patch_torch_functions,
        opt_properties=chosen,
    )
    AMP.handle = AmpHandle([])
    returned = models if isinstance(models, nn.Module) else nets
    if optimizers is None:
        return returned
    return returned, (ready[0] if given == [optimizers] else ready)


def _listed(given: Any) -> list[Any]:
    several = isinstance(given, Iterable) and not hasattr(given, "param_groups")
    return list(given) if several else [given]


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`

    At its end the gradients are checked and unscaled: they are true, and may be looked at and
    clipped. Gradients of earlier blocks are added, whatever their scale was. After an overflow the
    next `step()` of these optimizers does nothing. With `delay_unscale` all this is left to the
    next block of this loss, or to `step()`. `model` and `delay_overflow_check` are not used.

    >>> w = nn.Parameter(torch.zeros(1))
    >>> net = nn.ParameterList([w])
    >>> net, optimizer = initialize(net, torch.optim.SGD([w], lr=1.0))
    >>> for x in (1.0, 2.0):
    ...     with scale_loss((w * x).sum(), optimizer) as scaled_loss:
    ...         scaled_loss.backward()
    >>> w.grad
    tensor([3.])
    """
    AMP.check()
    if AMP.scaler is None:
        yield loss
        return
    guards = list(dict.fromkeys(guard_of(optimizer) for optimizer in _listed(optimizers)))
    key = AMP.key(loss_id)
    begun = begin(loss_id, guards)
    try:
        yield AMP.scaler.scale(loss, key=key)
        end(begun, delay=delay_unscale)
    except BaseException:
        give_up(begun)
        raise


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scalers as apex saves them; empty if disabled.

    >>> model = initialize(nn.Linear(2, 1))
    >>> state_dict()
    {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    AMP.check()
    destination = {} if destination is None else destination
    destination.update(_state.save(AMP))
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Loads what apex or `amp.state_dict` saved; damage is refused and changes nothing.

    >>> model = initialize(nn.Linear(2, 1))
    >>> load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}})
    >>> _amp_state.loss_scalers[0].loss_scale()
    1024.0
    """
    AMP.check()
    settle_all()
    _state.load(AMP, state_dict)
