"""What is looked at in a sampled step besides gradients: forward pass, weights, what is trained.

One step in `every` is looked at, and the first. Numbers of an accelerator are read a step later.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...journal import Recorder
from ..places import Places
from . import weights
from .calls import CallOrder, parameters_of
from .forward import Forward
from .lines import Sent, is_late

_PER_SAMPLE = 2  # looks for each sample of gradients
_OFTEN, _RARER = 10, 4  # after so many looks there is one in so many times as many steps
_SETTINGS = ("lr", "eps", "betas", "weight_decay", "momentum", "fused", "foreach", "capturable")
_GROUPS = 10  # parameter groups whose settings are written down
_MOST_EXTRA = 20  # steps that are looked at because the one before was not finite
_SHOWN = 20  # names in a list
_MOST_IDLE = 500  # such as those of experts that were not chosen


class Sampling:
    """What is looked at in the current window, and the calls in it."""

    def __init__(
        self,
        recorder: Recorder,
        names: Callable[[Any], dict[int, str]],
        places: Places | None = None,
    ) -> None:
        self.recorder, self.names = recorder, names
        self.calls, self.forward = CallOrder(recorder, places), Forward()
        self.every = max(1, recorder.every // _PER_SAMPLE) if recorder.every else 0
        self.windows = 0
        self.weighed: tuple[Any, weights.WeightLook] | None = None
        self.late: list[Callable[[], None]] = []
        self.described: set[str] = set()
        self.owned: dict[int, ref[Tensor]] = {}
        """Parameters that an optimizer has stepped, which may be gone by now; by id."""
        self.also, self.extra, self.modules = False, 0, 0
        self.begin()

    def begin(self) -> None:
        """Begins a window."""
        often = self.every if self.windows < _OFTEN * self.every else _RARER * self.every
        self.looking = self.also or (bool(self.every) and self.windows % often == 0)
        self.also = False
        if self.looking:
            self.forward.begin()

    def end(self, step: int) -> None:
        """Ends the window of a step that has its line in the journal."""
        for write in self.late:
            write()
        self.late.clear()
        self.calls.end(step)
        if self.looking:
            found = self.forward.end()
            if found is not None:
                modules, numbers = found
                self._when_read(numbers, lambda rows: self._write_forward(step, modules, rows))
            if self.forward.seen > self.modules:  # new ones: at first, or in mid-run
                self.modules = self.forward.seen
                self.write_trained(step)
        self.windows += 1
        self.begin()

    def look_next(self) -> None:
        """After a step that was not finite: the next forward pass is looked at too."""
        if self.every and self.extra < _MOST_EXTRA:
            self.extra += 1
            self.also = True

    def close(self) -> None:
        """Ends the last window, which may be unfinished, and writes what is left."""
        for write in self.late:
            write()
        self.forward.end()
        self.calls.close(max(0, self.windows - 1))
        self.write_trained(max(0, self.windows - 1))

    # Weights

    def before_step(self, optimizer: Any) -> None:
        """The outermost step of an optimizer begins, inside a scaler's or not."""
        if self.looking:
            self.owned.update((id(p), ref(p)) for p in parameters_of(optimizer))
        if self.looking and self.weighed is None:
            self.weighed = optimizer, weights.before(optimizer)

    def after_step(self, optimizer: Any, step: int) -> None:
        if self.weighed is None or self.weighed[0] is not optimizer:
            return
        _, look = self.weighed
        self.weighed = None
        self._describe(optimizer, step)
        if look.params and not _skipped(optimizer):
            names = self.names(optimizer)
            rows = weights.after(optimizer, look)
            without = [p.grad is None for p in look.params]
            named = [names.get(id(p), "?") for p in look.params]
            dtypes = [str(p.dtype).removeprefix("torch.") for p in look.params]
            self._when_read(
                rows, lambda rows: self._write_weights(step, named, dtypes, without, rows)
            )

    def _describe(self, optimizer: Any, step: int) -> None:
        """The optimizer's settings, once."""
        label = self.calls.label(optimizer)
        if label in self.described:
            return
        self.described.add(label)
        groups = []
        for group in optimizer.param_groups[:_GROUPS]:
            settings = {k: _plain(group[k]) for k in _SETTINGS if k in group}
            dtypes = {str(p.dtype).removeprefix("torch.") for p in group["params"]}
            groups.append(
                {**settings, "parameters": len(group["params"]), "dtypes": sorted(dtypes)}
            )
        kind = type(optimizer)
        self.recorder.event(
            "optimizer", step, who=label, type=f"{kind.__module__}.{kind.__name__}", groups=groups
        )

    # Lines

    def _when_read(self, numbers: Tensor, write: Callable[[list[list[float]]], None]) -> None:
        if not is_late([numbers]):
            write(numbers.tolist())
            return
        sent = Sent(list(numbers.reshape(-1)))
        width = numbers.shape[1]
        self.late.append(lambda: write([list(row) for row in _rows(sent.values(), width)]))

    def _write_forward(
        self, step: int, modules: list[tuple[str, str, str, int]], rows: list[list[float]]
    ) -> None:
        found = {}
        for (name, kind, dtype, elements), (amax, top, zeros, nonfinite) in zip(modules, rows):
            found[name] = {"type": kind, "dtype": dtype, "elements": elements, "amax": amax}
            found[name]["zero"] = zeros / elements
            if top < 0:
                found[name]["top"] = top
            if nonfinite:
                found[name]["nonfinite"] = int(nonfinite)
        self.recorder.forward(step, found)

    def _write_weights(
        self,
        step: int,
        names: list[str],
        dtypes: list[str],
        without: list[bool],
        rows: list[list[float]],
    ) -> None:
        at = {field: i for i, field in enumerate(weights.FIELDS)}
        found = {}
        for name, dtype, none, row in zip(names, dtypes, without, rows):
            entry: dict[str, Any] = {"dtype": dtype} | ({"gradient": "none"} if none else {})
            for field in weights.FIELDS:
                value = row[at[field]]
                if field in ("nonfinite", "alike"):
                    entry |= {field: int(value)} if value else {}
                elif value == value or field in ("rms", "amax", "update"):
                    entry[field] = value
            found[name] = entry
        self.recorder.weights(step, found)

    # Who is trained

    def write_trained(self, step: int) -> None:
        """Parameters of modules that were called and that no optimizer has; those that two have;
        those of optimizers whose modules were not called."""
        optimizers = [o for o in living_optimizers() if not _is_inner(o)]
        modules = list(self.forward.called)
        if not optimizers or not modules:
            return
        used = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        wanted = {i: p for i, p in used.items() if p.requires_grad}
        without = {id(p) for m in self.forward.called_without for p in m._parameters.values()}
        owners: dict[int, int] = {}
        for optimizer in optimizers:
            for i in {id(p) for p in parameters_of(optimizer)}:
                owners[i] = owners.get(i, 0) + 1
        names: dict[int, str] = {}
        for optimizer in optimizers:
            names.update(self.names(optimizer))
        once = {i for i, owned in self.owned.items() if owned() is used.get(i)}
        left = [p for i, p in wanted.items() if i not in owners and i not in once]
        if left:
            from ...torch.names import found

            names.update({**found(), **names})
        facts: dict[str, Any] = {
            "left_out": [names.get(id(p), f"shape {tuple(p.shape)}") for p in left][:_SHOWN],
            "left_out_count": len(left),
            "shared": [names.get(i, "?") for i, n in owners.items() if n > 1][:_SHOWN],
            "not_called": [names.get(i, "?") for i in owners if i not in used and i not in without][
                :_MOST_IDLE
            ],
            "trained": len(wanted) - len(left),
        }
        self.recorder.event("trained", step, **facts)


def living_optimizers() -> list[Any]:
    """Of the whole process; walks every object once."""
    kind = torch.optim.Optimizer
    found = [o for o in gc.get_objects() if issubclass(type(o), kind)]
    return [o for o in found if "param_groups" in vars(o)]


def _is_inner(optimizer: Any) -> bool:
    """Does another optimizer step it, on parameters of its own making?"""
    return all(not isinstance(p, torch.nn.Parameter) for p in parameters_of(optimizer))


def _skipped(optimizer: Any) -> bool:
    """Has a fused optimizer skipped this step? Reading that from a device would wait for it."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and found_inf.device.type == "cpu" and bool(found_inf)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def _rows(values: list[float], width: int) -> Iterable[list[float]]:
    return (values[i : i + width] for i in range(0, len(values), width))
