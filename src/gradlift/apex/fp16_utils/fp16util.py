"""apex's helpers for a loop of one's own: a float16 model, float32 masters, and the ways between.

>>> import torch
>>> model = network_to_half(torch.nn.Linear(2, 1))
>>> params, masters = prep_param_lists(model)
>>> optimizer = torch.optim.SGD(masters, lr=0.1)
>>> (model(torch.ones(1, 2)).sum() * 128.0).backward()
>>> model_grads_to_master_grads(params, masters)
>>> for p in masters:
...     p.grad /= 128.0
>>> optimizer.step()
>>> master_params_to_model_params(params, masters)
>>> torch.equal(params[0], masters[0].half())
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from ...errors import MisuseError
from ...torch import half_model
from ...torch.masters.half_model import cast
from ..preparation import is_batch_norm

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(nn.Module):
    """A module that casts its input.

    >>> tofp16()(torch.ones(1)).dtype
    torch.float16
    """

    def forward(self, input: Any) -> Any:
        return cast(input, torch.float16)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Batch norms back in float32, in place.

    >>> BN_convert_float(nn.Sequential(nn.BatchNorm1d(2)).half())[0].weight.dtype
    torch.float32
    """
    for each in module.modules():
        if is_batch_norm(each):
            each.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """The network in float16, but for its batch norms; inputs are cast, outputs are float32.

    As in apex it is the second of two modules, so that names in checkpoints begin with "1.".

    >>> model = network_to_half(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
    >>> {name: p.dtype for name, p in model.named_parameters() if "weight" in name}
    {'1.0.weight': torch.float16, '1.1.weight': torch.float32}
    """
    return nn.Sequential(nn.Identity(), half_model(network, keep_fp32=is_batch_norm))


def convert_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module's own floating-point parameters, gradients and buffers in `dtype`, in place; not
    those of its children.

    >>> convert_module(nn.Linear(2, 1), torch.float16).weight.dtype
    torch.float16
    """
    return module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A network in `dtype`, in place, but for batch norms that have weights.

    >>> net = convert_network(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), torch.float16)
    >>> [p.dtype for p in net.parameters()][1:3]
    [torch.float16, torch.float32]
    """
    for module in network.modules():
        if not (is_batch_norm(module) and module.affine):
            convert_module(module, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network in float16, but for batch norms that have weights; inputs are cast, outputs are as
    the network gives them.

    >>> model = FP16Model(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    >>> model(torch.randn(4, 2)).dtype, model.network[0].weight.dtype
    (torch.float16, torch.float32)
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: Any) -> Any:
        return self.network(*cast(inputs, torch.float16))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters to train, and float32 masters of them: one each, or all in one.

    >>> [len(params) for params in prep_param_lists(nn.Linear(2, 1).half(), flat_master=True)]
    [2, 1]
    """
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return params, [p.detach().clone().float().requires_grad_() for p in params]
    kinds = {p.dtype for p in params}
    if len(kinds) > 1:
        raise MisuseError(
            f"flat_master=True wants parameters of one type, these are {sorted(map(str, kinds))}: "
            "use flat_master=False, or FP16_Optimizer"
        )
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]).float())
    flat.grad = torch.zeros_like(flat)
    return params, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the gradients of float16 parameters into their masters'.

    >>> params, masters = prep_param_lists(nn.Linear(2, 1).half())
    >>> params[0].grad = torch.ones_like(params[0])
    >>> model_grads_to_master_grads(params, masters)
    >>> masters[0].grad, masters[1].grad
    (tensor([[1., 1.]]), None)
    """
    if not flat_master:
        for p, master in zip(model_params, master_params):
            master.grad = None if p.grad is None else p.grad.detach().to(master.dtype, copy=True)
        return
    (flat,) = master_params
    missing = sum(p.grad is None for p in model_params)
    if missing:
        raise MisuseError(
            f"flat_master=True wants a gradient for every parameter, {missing} have none: use "
            "flat_master=False, or FP16_Optimizer"
        )
    parts = [p.grad.detach().reshape(-1) for p in model_params if p.grad is not None]
    flat.grad = torch.cat(parts).to(flat.dtype)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Rounds masters into the parameters that they belong to.

    >>> params, masters = prep_param_lists(nn.Linear(2, 1).half())
    >>> with torch.no_grad():
    ...     masters[1].fill_(1 + 2.0**-20) and None
    >>> master_params_to_model_params(params, masters)
    >>> params[1].item()
    1.0
    """
    with torch.no_grad():
        if flat_master:
            sizes = [p.numel() for p in model_params]
            parts = master_params[0].split(sizes)
            master_params = [part.view_as(p) for part, p in zip(parts, model_params)]
        for p, master in zip(model_params, master_params):
            p.copy_(master)


def to_python_float(t: Any) -> float:
    """
    >>> to_python_float(torch.tensor([2.0]))
    2.0
    """
    return float(t.item() if hasattr(t, "item") else t[0])
