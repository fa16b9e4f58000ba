"""After a loss that is not finite: which module was the first to give something that is not?"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..journal import Recorder
from ..torch.nested import tensors
from ..torch.scaler.retrying import Replay
from .patches import Patches


class Call(NamedTuple):
    """A call of an outermost module, and what it needs to be made once more."""

    module: nn.Module
    args: Any
    kwargs: Any
    before: Replay
    autocast: list[torch.autocast]
    versions: list[int]
    """Of the tensors it was given: one that was changed since is no longer what it was."""


class Tracer:
    """Remembers the last iteration's calls of outermost modules; after a NaN loss they are made
    once more.

    The second time every module's output is looked at. Random numbers and buffers are put back, so
    that training goes on as if nothing had happened. `loss` is called before each backward pass,
    when the calls that led to that loss are the remembered ones.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.patches = Patches()
        self.depth = 0
        self.tracing = False
        self.calls: list[Call] = []
        self.waiting: list[tuple[str, int | None, dict[str, str]]] = []
        self.first: tuple[nn.Module, str] | None = None
        plain_call = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.depth == 0 and module.training and not self.tracing:
                self.remember(module, args, kwargs)
            self.depth += 1
            try:
                output = plain_call(module, *args, **kwargs)
            finally:
                self.depth -= 1
            if self.tracing and self.first is None and not _kind((args, kwargs)):
                kind = _kind(output)
                self.first = (module, kind) if kind else None
            return output

        self.patches.attribute(nn.Module, "__call__", call)

    def remember(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen = [i for i, call in enumerate(self.calls) if call.module is module]
        del self.calls[: seen[-1] + 1 if seen else 0]  # called again: a new iteration
        modes = [
            torch.autocast(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d))
            for d in {"cpu", *(t.device.type for t in tensors((args, kwargs)))}
        ]
        versions = [t._version for t in tensors((args, kwargs))]
        self.calls.append(Call(module, args, kwargs, Replay(module), modes, versions))

    def loss(self, losses: list[Tensor], step: int) -> None:
        """Looks for the module that made a loss of this step non-finite."""
        self.flush()
        if not _kind(losses):
            return
        self.first = None
        for call in self.calls:
            if kind := _kind((call.args, call.kwargs)):
                self._tell(step, "(input)", kind, "input")
                return
            if [t._version for t in tensors((call.args, call.kwargs))] != call.versions:
                self._note(step, "an input was changed in place since")
                return
            self.again(call, step)
            if self.first is not None:
                module, kind = self.first
                name = next((n for n, m in call.module.named_modules() if m is module), "")
                self._tell(step, name or type(call.module).__name__, kind, "forward")
                return
        self._note(step, "every module gave finite numbers when it was run again")

    def again(self, call: Call, step: int | None) -> None:
        """Makes a call once more, and puts everything back."""
        after = Replay(call.module)
        self.tracing = True
        try:
            call.before.restore()
            with torch.no_grad(), contextlib.ExitStack() as modes:
                for mode in call.autocast:
                    modes.enter_context(mode)
                call.module(*call.args, **call.kwargs)
        except Exception as error:  # what cannot be run again cannot be traced
            self._note(step, f"{error!r:.200}")
        finally:
            self.tracing = False
            after.restore()

    def _note(self, step: int | None, why: str) -> None:
        detail = {"code": "untraced", "text": f"could not trace the NaN: {why}"}
        self.waiting.append(("note", step, detail))

    def _tell(self, step: int | None, module: str, kind: str, where: str) -> None:
        self.waiting.append(("trace", step, {"module": module, "found": kind, "where": where}))

    def flush(self, *, at_end: bool = False) -> None:
        """Writes what was found; not before a scale or an optimizer has described the run."""
        if self.recorder.channels or at_end:
            for what, step, detail in self.waiting:
                for journal in self.recorder.journals:
                    journal.event(what, step, **detail)
            self.waiting.clear()

    def remove(self) -> None:
        self.flush(at_end=True)
        self.patches.restore()


def _kind(value: Any) -> str:
    """ "nan" or "inf" if any tensor in it is not finite, else ""."""
    for t in tensors(value):
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            return "nan" if bool(torch.isnan(t).any()) else "inf"
    return ""
