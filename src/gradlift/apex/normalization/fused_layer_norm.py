"""`apex.normalization.fused_layer_norm` over torch's functions.

>>> import torch
>>> norm = FusedLayerNorm(4)
>>> x = torch.randn(2, 4)
>>> torch.equal(norm(x), torch.nn.LayerNorm(4)(x))
True
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import SettingsError

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch's layer norm, computed in the widest type of its arguments; the result is of the
    input's. `memory_efficient` is not used.

    >>> fused_layer_norm_affine(torch.ones(1, 2).half(), torch.ones(2), torch.ones(2), (2,)).dtype
    torch.float16
    """
    x, scale, shift = _widest(input, weight, bias)
    normed = functional.layer_norm(x, _shape(normalized_shape), scale, shift, eps)
    return normed.to(input.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Without weights.

    >>> fused_layer_norm(torch.tensor([[1.0, -1.0]]), 2, eps=0.0)
    tensor([[ 1., -1.]])
    """
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """The result is of the weights' type.

    >>> x, w = torch.ones(1, 2).half(), torch.ones(2)
    >>> mixed_dtype_fused_layer_norm_affine(x, w, w, (2,)).dtype
    torch.float32
    """
    x = input.to(torch.promote_types(input.dtype, weight.dtype))
    return fused_layer_norm_affine(x, weight, bias, normalized_shape, eps).to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Any,
    eps: float | None = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """torch's RMS norm, computed in the widest type of its arguments; the result is of the input's.

    >>> fused_rms_norm_affine(torch.full((1, 2), 3.0), torch.ones(2), (2,), eps=0.0)
    tensor([[1., 1.]])
    """
    x, scale = _widest(input, weight)
    return functional.rms_norm(x, _shape(normalized_shape), scale, eps).to(input.dtype)


def fused_rms_norm(
    input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Without weights.

    >>> fused_rms_norm(torch.full((1, 2), -3.0), 2, eps=0.0)
    tensor([[-1., -1.]])
    """
    return fused_rms_norm_affine(input, None, normalized_shape, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Any,
    eps: float | None = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """The result is of the weights' type.

    >>> x, w = torch.ones(1, 2).half(), torch.ones(2)
    >>> mixed_dtype_fused_rms_norm_affine(x, w, (2,)).dtype
    torch.float32
    """
    x = input.to(torch.promote_types(input.dtype, weight.dtype))
    return fused_rms_norm_affine(x, weight, normalized_shape, eps).to(weight.dtype)


def manual_rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float
) -> Tensor:
    """The mixed one, with apex's order of arguments; without weights the input's type stays.

    >>> manual_rms_norm(torch.full((1, 2), 3.0), (2,), None, 0.0)
    tensor([[1., 1.]])
    """
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)


def _widest(*given: Tensor | None) -> tuple[Any, ...]:
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in given if x is not None))
    return tuple(None if x is None else x.to(dtype) for x in given)


def _shape(given: Any) -> list[int]:
    return [given] if isinstance(given, int) else list(given)


class FusedLayerNormAffineFunction:
    """For scripts that call its `apply`.

    >>> FusedLayerNormAffineFunction.apply(torch.ones(1, 2), None, torch.ones(2), (2,), 1e-5)
    tensor([[1., 1.]])
    """

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction:
    """For scripts that call its `apply`.

    >>> FusedLayerNormFunction.apply(torch.tensor([[1.0, -1.0]]), (2,), 0.0)
    tensor([[ 1., -1.]])
    """

    apply = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction:
    """For scripts that call its `apply`.

    >>> FusedRMSNormAffineFunction.apply(torch.full((1, 2), 3.0), torch.ones(2), (2,), 0.0)
    tensor([[1., 1.]])
    """

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction:
    """For scripts that call its `apply`.

    >>> FusedRMSNormFunction.apply(torch.full((1, 2), 3.0), (2,), 0.0)
    tensor([[1., 1.]])
    """

    apply = staticmethod(fused_rms_norm)


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm with apex's arguments; input and weights may be of different types.

    >>> FusedLayerNorm(4, elementwise_affine=False)(torch.ones(1, 4).half()).dtype
    torch.float16
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **more)

    def forward(self, input: Tensor) -> Tensor:
        return fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedLayerNorm(FusedLayerNorm):
    """The result is of the weights' type, whatever the input's is.

    >>> MixedFusedLayerNorm(4)(torch.ones(1, 4).half()).dtype
    torch.float32
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **more: Any) -> None:
        _check_affine(more)
        super().__init__(normalized_shape, eps, True, **more)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class FusedRMSNorm(nn.RMSNorm):
    """torch's RMSNorm with apex's arguments; input and weights may be of different types.

    >>> FusedRMSNorm(4)(torch.ones(1, 4).half()).dtype
    torch.float16
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, **more)

    def forward(self, input: Tensor) -> Tensor:
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """The result is of the weights' type, whatever the input's is.

    >>> MixedFusedRMSNorm(4)(torch.ones(1, 4).half()).dtype
    torch.float32
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **more: Any) -> None:
        _check_affine(more)
        super().__init__(normalized_shape, eps, True, **more)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps
        )


def _check_affine(more: dict[str, Any]) -> None:
    """The mixed ones have weights, as in apex."""
    if not more.pop("elementwise_affine", True):
        raise SettingsError(
            "elementwise_affine=False: a mixed norm's result is of its weights' type; take "
            "FusedLayerNorm or FusedRMSNorm"
        )
