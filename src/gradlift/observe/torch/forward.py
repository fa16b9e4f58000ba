"""What modules return in the forward passes of a sampled step."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ...torch.names import outermost
from ...torch.nested import tensors
from ...torch.ranks.sharding import local


class Forward:
    """Looks at the output of every module between `begin` and `end`.

    Only passes that are differentiated count. A module that is called several times in a step has
    one row. Where torch has compiled code nothing is looked at: a hook would compile it anew.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> forward = Forward()
    >>> forward.begin()
    >>> out = net(torch.ones(1, 2))
    >>> names, numbers = forward.end()
    >>> [name for name, *_ in names], numbers.shape
    (['0', '1'], torch.Size([2, 4]))
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.rows: dict[int, tuple[nn.Module, str, int, Tensor]] = {}
        self.last: Tensor | None = None
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.called: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        """Every module that was seen while gradients were wanted, and is still there."""
        self.called_without: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        """The same, under no_grad."""
        self.seen = 0
        """How many modules were called so far, those that are gone included."""
        self.compiled = False

    @property
    def looking(self) -> bool:
        return self.handle is not None

    def begin(self) -> None:
        self.compiled = self.compiled or has_compiled()
        if self.handle is None and not self.compiled:
            self.handle = register_module_forward_hook(self._look)

    def will_compile(self, what: Any) -> None:
        """Before `torch.compile`: code is not to be compiled with our hook in it."""
        self.compiled = self.compiled or isinstance(what, nn.Module)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled():
            self.called_without[module] = None
            return
        try:
            with torch.no_grad():
                self._add(module, output)
        except Exception:  # what cannot be looked at is left out
            return

    def _add(self, module: nn.Module, output: Any) -> None:
        self.seen += module not in self.called
        self.called[module] = None
        found = [t for t in tensors(output) if t.is_floating_point() and t.numel()]
        if not found or found[0] is self.last:  # a container returns what its last child returned
            return
        self.last = found[0]
        t = local(found[0].detach())
        low, high = torch.aminmax(t)
        peak = torch.maximum(-low, high).float()
        zeros = t.numel() - torch.count_nonzero(t)
        if t.device.type == "cpu" and bool(torch.isfinite(peak)):  # reading it costs nothing here
            nonfinite = peak.new_zeros(())
        else:
            nonfinite = (t.numel() - torch.isfinite(t).sum()).float()
        row = torch.stack((peak, high.float(), zeros.float(), nonfinite))
        before = self.rows.get(id(module))
        elements = t.numel()
        if before is not None:
            _, _, n, old = before
            row = torch.cat((torch.maximum(row[:2], old[:2]), row[2:] + old[2:]))
            elements += n
        self.rows[id(module)] = module, str(t.dtype).removeprefix("torch."), elements, row

    def end(self) -> tuple[list[tuple[str, str, str, int]], Tensor] | None:
        """(name, type, dtype, elements) of each module in the order of their calls; and of each the
        largest |number|, the largest number, how many are zero, how many are not finite. None if
        none was seen."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        rows, self.rows, self.last = self.rows, {}, None
        if not rows:
            return None
        modules = [module for module, *_ in rows.values()]
        if any(m not in self.names for m in modules):
            self._name()
        names = [
            (self.names.get(m, type(m).__name__), type(m).__name__, dtype, n)
            for m, dtype, n, _ in rows.values()
        ]
        device = next(iter(rows.values()))[3].device
        numbers = torch.stack([row.to(device, non_blocking=True) for *_, row in rows.values()])
        return names, numbers

    def _name(self) -> None:
        """Dotted paths from the outermost module; a module without parent is named by its class."""
        taken = set(self.names.values())
        for top in outermost():
            for path, module in top.named_modules():
                if module in self.names:
                    continue
                wanted = name = path or type(top).__name__
                n = 1
                while name in taken:
                    n += 1
                    name = f"{wanted} [{n}]"
                taken.add(name)
                self.names[module] = name


def has_compiled() -> bool:
    """Has torch compiled anything in this process?"""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo is not None and dynamo.counters["frames"]["total"])
