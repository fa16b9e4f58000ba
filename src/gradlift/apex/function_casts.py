"""`amp.init`: torch's functions cast their arguments, wherever they are called; the API of 2018."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import MisuseError
from ..torch.nested import tensors
from .casts import float_function, half_function, promote_function
from .guard import Guard, settle_all
from .opt_levels import scale_rule
from .session import AMP, make_scaler

_HALF = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu
addmm addmv addr matmul __matmul__ __rmatmul__ mm mv addbmm baddbmm bmm
rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell rnn_tanh rnn_relu lstm gru
"""
_FLOAT = """
acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow __pow__ __rpow__
cumprod cumsum dist norm prod renorm std sum var cpu
interpolate softplus softmin softmax log_softmax layer_norm group_norm local_response_norm normalize
cosine_similarity cross_entropy nll_loss poisson_nll_loss kl_div l1_loss mse_loss smooth_l1_loss
binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss margin_ranking_loss
multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss soft_margin_loss
triplet_margin_loss
"""
_PROMOTE = ["addcdiv", "addcmul", "bilinear", "cross", "dot"]
"""torch itself promotes in the others of apex's list."""
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)

_Undo = Callable[[], None]


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Casts the arguments of torch's functions from now on: products in float16, sums, powers,
    norms and losses in float32. `handle._deactivate()`, or `amp.initialize`, ends it.

    `allow_banned` lets `binary_cross_entropy` take float16. The other two arguments are not used.

    >>> from gradlift.apex import amp
    >>> w = nn.Parameter(torch.ones(2, 2))
    >>> optimizer = torch.optim.SGD([w], lr=1.0)
    >>> handle = amp.init()
    >>> (w @ w).dtype, w.sum().dtype
    (torch.float16, torch.float32)
    >>> with handle.scale_loss((w @ w).sum() / 2**10, optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> handle._deactivate()
    >>> (w @ w).dtype, w[0, 0].item()
    (torch.float32, 0.99609375)
    """
    settle_all()
    if not enabled:
        AMP.begin()
        return AmpHandle([])
    rule = scale_rule(loss_scale)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    AMP.begin(scaler=make_scaler(device, rule, None), own_rule=rule, casts=True)
    AMP.handle = AmpHandle(_patched(allow_banned))
    return AMP.handle


class AmpHandle:
    """What `amp.init` returns.

    >>> handle = AmpHandle([])
    >>> handle.is_active()
    False
    """

    def __init__(self, undo: list[_Undo]) -> None:
        self._undo, self._losses = undo, 0

    def is_active(self) -> bool:
        return AMP.handle is self and not AMP.deactivated

    def _deactivate(self) -> None:
        """Ends all casts."""
        while self._undo:
            self._undo.pop()()
        if AMP.handle is self:
            AMP.deactivated = True

    def scale_loss(self, loss: Tensor, optimizer: Any) -> contextlib.AbstractContextManager[Tensor]:
        """`amp.scale_loss`, for an optimizer that need not be initialized."""
        return self._scaled(loss, optimizer, 0)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> WrappedOptimizer:
        """The optimizer with a `scale_loss` of its own, and a scale for each of `num_loss` losses.

        >>> from gradlift.apex import amp
        >>> w = nn.Parameter(torch.ones(1))
        >>> handle = amp.init()
        >>> optimizer = handle.wrap_optimizer(torch.optim.SGD([w], lr=1.0), num_loss=2)
        >>> for x in (0.25, 0.5):
        ...     with optimizer.scale_loss((w * x).sum()) as scaled_loss:
        ...         scaled_loss.backward()
        >>> optimizer.step()
        >>> handle._deactivate()
        >>> w.item()
        0.25
        """
        if AMP.scaler is not None and AMP.scaler.result is not None:
            raise MisuseError(
                "wrap_optimizer() was called after a loss had been scaled: wrap all optimizers "
                "right after amp.init()"
            )
        first, self._losses = self._losses, self._losses + num_loss
        AMP.num_losses = self._losses
        return WrappedOptimizer(self, optimizer, range(first, self._losses))

    def _scaled(self, loss: Tensor, optimizer: Any, loss_id: int) -> Any:
        from .amp import scale_loss  # which hands out `init`

        if AMP.scaler is None:
            return contextlib.nullcontext(loss)
        if not hasattr(optimizer, "_amp_guard"):
            Guard(optimizer)
        return scale_loss(loss, optimizer, loss_id)


class WrappedOptimizer:
    """What `wrap_optimizer` returns: losses take turns between two steps."""

    def __init__(self, handle: AmpHandle, optimizer: Any, loss_ids: range) -> None:
        self._handle, self._optimizer, self._loss_ids = handle, optimizer, loss_ids
        self._used = 0

    def scale_loss(self, loss: Tensor) -> contextlib.AbstractContextManager[Tensor]:
        if self._used == len(self._loss_ids):
            raise MisuseError(
                f"scale_loss() was called {self._used + 1} times before step(), but wrap_optimizer "
                f"was called with num_loss={self._used}: pass it the number of losses"
            )
        self._used += 1
        return self._handle._scaled(loss, self._optimizer, self._loss_ids[self._used - 1])

    def step(self, closure: Any = None) -> Any:
        self._used = 0
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)


# Patches


def _patched(allow_banned: bool) -> list[_Undo]:
    """Puts functions that cast in the place of torch's; returns what puts them back."""
    undo: list[_Undo] = []
    places = (torch, functional, Tensor, torch._VF)
    for names, casting in (
        (_HALF.split(), half_function),
        (_FLOAT.split(), float_function),
        (_PROMOTE, promote_function),
    ):
        for place in places:
            for name in names:
                if hasattr(place, name):
                    undo.append(_exchange(place, name, casting(getattr(place, name))))
    for name in (f"{name}_" for name in _FLOAT.split()):
        if hasattr(Tensor, name):
            instead = f"call .float() on it, or use {name.rstrip('_')}"
            undo.append(_exchange(Tensor, name, _refusing(getattr(Tensor, name), instead)))
    for kind in _RECURRENT:  # refuses inputs of another type than its weights
        undo.append(_exchange(kind, "forward", float_function(kind.forward)))
    entropy = functional.binary_cross_entropy
    instead = "use binary_cross_entropy_with_logits, or amp.init(allow_banned=True)"
    new = float_function(entropy) if allow_banned else _refusing(entropy, instead)
    undo.append(_exchange(functional, "binary_cross_entropy", new))
    return undo


def _exchange(place: Any, name: str, new: Any) -> _Undo:
    own = vars(place).get(name)
    setattr(place, name, new)
    if own is None:  # inherited
        return functools.partial(delattr, place, name)
    return functools.partial(setattr, place, name, own)


def _refusing(fn: Callable[..., Any], instead: str) -> Callable[..., Any]:
    @functools.wraps(fn)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if AMP.casting and any(x.dtype is torch.float16 for x in tensors((args, kwargs))):
            raise NotImplementedError(
                f"{fn.__name__} of a float16 tensor, whose result can leave float16: {instead}"
            )
        return fn(*args, **kwargs)

    return refusing
