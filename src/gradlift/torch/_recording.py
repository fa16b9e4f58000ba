"""gradlift's scaler in place of torch's, under every name a script may know it by."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..journal import Event, Journal, Step
from ._scaler import GradScaler

_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


class _Labelled:
    """One scaler's part of a journal that several share."""

    def __init__(self, journal: Journal, label: str) -> None:
        self._journal, self._label = journal, label
        self.describe, self.sample, self.probe = journal.describe, journal.sample, journal.probe

    def step(self, step: Step) -> None:
        key = "/".join(k for k in (self._label, step.key) if k)
        self._journal.step(step._replace(key=key))

    def event(self, what: str, step: int | None = None, **detail: Any) -> None:
        if self._label:
            detail["key"] = "/".join(k for k in (self._label, detail.get("key", "")) if k)
        self._journal.event(what, step, **detail)


def record(
    journal: Journal,
    *,
    rule: str | None,
    every: int | None,
    on_event: Callable[[Event], None] | None = None,
) -> Callable[[], None]:
    """Makes every scaler that is made from now on gradlift's, recording to `journal`.

    Without `rule` it does what torch's own would have done, to the bit, if each loss is finite.
    Returns what has to be called at the end: a device tells of a step one step later.
    """
    made: list[weakref.ref[GradScaler]] = []

    class Recorded(GradScaler):
        """`torch.amp.GradScaler`, recorded."""

        def __init__(self, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
            made.append(weakref.ref(self))
            given = dict(zip(_ARGUMENTS, args)) | kwargs
            if rule is not None:
                given = {k: v for k, v in given.items() if k not in _ARGUMENTS[:4]}
                given["rule"] = rule
            label = "" if len(made) == 1 else f"scaler {len(made)}"
            super().__init__(
                device,
                **given,
                journal=_Labelled(journal, label),  # type: ignore[arg-type]
                sample_every=every,
                on_event=on_event,
                allow_fp16_params=True,  # torch lets them pass, so a script may have them
            )

    def of(device: str) -> type[GradScaler]:
        class OfDevice(Recorded):
            """`torch.cuda.amp.GradScaler`, or `torch.cpu.amp.GradScaler`, recorded."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(device, *args, **kwargs)

        return OfDevice

    class Sharded(Recorded):
        """FSDP1's `ShardedGradScaler`, recorded: all ranks of its group decide together."""

        def __init__(
            self,
            device: str = "cuda",
            init_scale: float = 2.0**16,
            backoff_factor: float = 0.5,
            growth_factor: float = 2.0,
            growth_interval: int = 2000,
            enabled: bool = True,
            process_group: Any = None,
        ) -> None:
            if process_group is None and torch.distributed.is_initialized():
                process_group = torch.distributed.group.WORLD
            super().__init__(
                device,
                init_scale,
                growth_factor,
                backoff_factor,
                growth_interval,
                enabled,
                process_group=process_group,
            )

    for kind, *modules in (
        (Recorded, torch.amp.grad_scaler, torch.amp),
        (of("cuda"), torch.cuda.amp.grad_scaler, torch.cuda.amp),
        (of("cpu"), torch.cpu.amp.grad_scaler, torch.cpu.amp),
    ):
        _exchange("GradScaler", kind, *modules)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import sharded_grad_scaler

        _exchange("ShardedGradScaler", Sharded, sharded_grad_scaler)

    def finish() -> None:
        for scaler in filter(None, (ref() for ref in made)):
            scaler.flush()

    return finish


def _exchange(name: str, kind: type[GradScaler], home: Any, *others: Any) -> None:
    """Takes a class's place; under its name and address, so that it can be pickled."""
    kind.__module__, kind.__qualname__, kind.__name__ = home.__name__, name, name
    for module in (home, *others):
        setattr(module, name, kind)
