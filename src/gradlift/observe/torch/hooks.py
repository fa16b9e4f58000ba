"""Hooks on torch that record a training run and change nothing in it.

    scale, backward      the loss, before it is scaled
    unscale_, clip, step the gradients, before the first of these changes them
    update, step         one line: a scaler's update, or a step of an optimizer without a scaler

Whether a step was made is torch's own verdict; why not is ours. Hooks only read: under `no_grad`,
without random numbers, collectives or in-place operations, and never while torch compiles. What a
hook cannot read is noted once in the journal, and training goes on.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...journal import Channel, Recorder, current, recorder
from ...rules import Off
from ...torch.names import culprits, name_apart
from ...torch.ranks.agreement import world_size
from ...torch.ranks.sharding import local
from ...torch.scaler.finite_check import dense, device_look, look
from ...torch.scaler.statistics import statistics
from ..patches import Patches
from ..places import Places
from .call_hooks import install
from .calls import parameters_of
from .edits import Edits
from .finder import loss_end
from .first_bad import FirstBad
from .lines import Losses, Number, Seen, StepLines, are_finite, is_late, rule_of, value
from .sampling import Sampling, living_optimizers
from .weights import fingerprint

_METHODS = ("scale", "unscale_", "step", "update")
_FIRST = 10  # steps of a run whose gradients are all looked at
_SMALL = 2**14  # elements of a gradient that is looked at in every step
_LOOKS_PER_SAMPLE = 5  # amax and norm are taken this many times as often as statistics


class Hooks:
    """Records to `recorder` what torch's scalers and optimizers do, until `remove()`.

    gradlift's own scalers record by themselves.

    >>> from gradlift.journal import Recorder, set_current
    >>> from gradlift.journal.writer import Journal
    >>> import os
    >>> recorder = Recorder(Journal(os.devnull), every=1)
    >>> set_current(recorder)
    >>> hooks = Hooks(recorder)
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> (w * 3).sum().backward()
    >>> torch.optim.SGD([w], lr=0.5).step()
    >>> hooks.remove()
    >>> set_current(None)
    >>> len(recorder.channels), w.tolist()
    (1, [-0.5, -0.5])
    """

    def __init__(
        self, recorder: Recorder, *, rerun: bool = False, places: Places | None = None
    ) -> None:
        self.recorder = recorder
        self.lines: WeakKeyDictionary[Any, StepLines] = WeakKeyDictionary()
        """By scaler, and by optimizer without one."""
        self.owners: WeakKeyDictionary[Any, StepLines] = WeakKeyDictionary()
        """The line in which an optimizer's steps are recorded."""
        self.looked: WeakKeyDictionary[Any, Seen] = WeakKeyDictionary()
        """Gradients that were looked at, by optimizer, and belong to a step to come."""
        self.names: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
        self.taken: dict[str, int] = {}
        self.clipped: tuple[ref[Any], int, int, list[ref[Any]]] | None = None
        """What the last call clipped: its first parameter, how many, and their optimizers."""
        self.searched: set[int] = set()  # parameters whose optimizer was looked for
        self.losses, self.losses_used = Losses(), False
        """Of backward passes since the last step; several optimizers may step on one loss."""
        self.within_backward = False
        self.frame = 0  # id of the frame of the outermost optimizer step
        self.counted: StepLines | Count | None = None  # whose loss comes next
        self.counts: WeakKeyDictionary[Any, Count] = WeakKeyDictionary()
        """The steps of gradlift's own scalers."""
        self.sampling = Sampling(recorder, self._named, places)
        self.calls = self.sampling.calls
        self.edits = Edits()
        self.first_bad = FirstBad(recorder, self.calls) if rerun else None
        self.unsought = False
        """Was it noted that nobody looks for the first bad operation?"""
        self.bare = 0
        self.disabled: set[str] = set()
        """What is known of scalers that do nothing."""
        self.failure, self.failure_noted = "", False
        self.force_late = False  # for tests: CPU tensors take the accelerator's path
        self.patches = Patches()
        self._install()

    def _install(self) -> None:
        kind = torch.amp.GradScaler
        for each in (kind, *_descendants(kind)):
            self._wrap_scaler(each)

        def subclass_made(cls: Any, /, **kwargs: Any) -> None:
            super(kind, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
            self._wrap_scaler(cls)

        self.patches.attribute(kind, "__init_subclass__", classmethod(subclass_made))
        self.patches.attribute(torch.autograd, "backward", self._backward(torch.autograd.backward))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            original = getattr(torch.nn.utils.clip_grad, name)
            self.patches.everywhere(name, original, self._clip(original))
        self.handles = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        self.patches.attribute(torch, "compile", self._compile(torch.compile))
        self._wrap_own_scaler()
        install(self.patches, self.calls)

    def remove(self) -> None:
        """Writes what is left to write, and puts back everything that was there."""
        for line in list(self.lines.values()):
            self._reading(line.flush)
        self._reading(self.sampling.close)
        for handle in self.handles:
            handle.remove()
        self.patches.restore()
        if self.first_bad is not None:
            self.first_bad.remove()
        self.failure = self.failure or self.calls.failure
        self._note_failure()
        self.recorder.flush()

    def _reading(self, read: Callable[..., Any], *args: Any) -> Any:
        """Calls what only reads. Its failure is noted, and is not the script's."""
        if current() is not self.recorder:  # in a forked child, or after the end
            return None
        differentiated = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what no_grad() does, in a tenth of its time
        finder = self.first_bad.finder if self.first_bad is not None else None
        if finder is not None:
            finder.paused += 1  # what is computed here is not the script's
        try:
            return read(*args)
        except Exception as error:
            self._failed(error)
            return None
        finally:
            torch._C._set_grad_enabled(differentiated)
            if finder is not None:
                finder.paused -= 1

    def _failed(self, error: Exception) -> None:
        self.failure = self.failure or f"could not record everything: {error!r:.200}"
        self._note_failure()

    def _note_failure(self) -> None:
        if self.failure and not self.failure_noted:
            self.failure_noted = True
            self.recorder.event("note", None, code="observer", text=self.failure)

    # Scalers

    def _wrap_scaler(self, kind: type) -> None:
        if any(k.__module__.split(".")[0] == "gradlift" for k in kind.__mro__):
            return  # gradlift's own
        for name in _METHODS:
            if name in vars(kind):
                self.patches.attribute(kind, name, self._wrapped(name, vars(kind)[name]))

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        from ...torch.scaler.grad_scaler import GradScaler

        before = getattr(self, f"_before_{name.rstrip('_')}")
        after: Any = getattr(self, f"_after_{name.rstrip('_')}", None)

        @functools.wraps(original)
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or isinstance(scaler, GradScaler):  # ours, within
                return original(scaler, *args, **kwargs)
            given = args[0] if args else kwargs.get("outputs", kwargs.get("optimizer"))
            line, kept = self._reading(self._enter, scaler, name, given, before) or (None, None)
            if line is None:
                return original(scaler, *args, **kwargs)
            line.within.add(name)
            recorder.depth += name == "step"
            try:
                value = original(scaler, *args, **kwargs)
            finally:
                recorder.depth -= name == "step"
                line.within.discard(name)
            if name == "scale":
                self.calls.note_scaled(value)
            elif kept is not None:
                self._reading(after, scaler, line, kept, given)
            return value

        return call

    def _enter(
        self, scaler: Any, method: str, given: Any, before: Callable[..., Any]
    ) -> tuple[StepLines, Any] | None:
        """Notes a call of a scaler, and what `before` finds; None if it is disabled, or its own
        parent's."""
        line = self._line_of(scaler)
        if line is None or method in line.within:
            return None
        if not line.within:  # step() unscales by itself
            self._note(scaler, method, given)
        try:
            return line, before(scaler, line, given)
        except Exception as error:
            self._failed(error)
            return line, None

    def _note(self, scaler: Any, method: str, given: Any) -> None:
        """A call of a scaler."""
        if method in ("step", "unscale_") and (edit := self.edits.found(given)):
            self.calls.add("gradients changed", given, edit)
        if method == "step":
            self.calls.add_step("scaler.step", given)
        elif method == "scale":
            self.calls.add("scale", scaler)
        elif method == "update":
            self.calls.add("update", scaler, "" if given is None else "new_scale")
        else:
            self.calls.add(method, given)

    def _wrap_own_scaler(self) -> None:
        """gradlift's own scalers record by themselves; their calls are noted here."""
        from ...torch.scaler.grad_scaler import GradScaler

        within: set[str] = set()

        def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                seen = not within and not torch.compiler.is_compiling()
                if not seen or current() is not self.recorder or not scaler.is_enabled():
                    return original(scaler, *args, **kwargs)
                given = args[0] if args else kwargs.get("outputs", kwargs.get("optimizer"))
                self._reading(self._note, scaler, name, given)
                count = self.counted = self.counts.setdefault(scaler, Count())
                within.add(name)
                try:
                    value = original(scaler, *args, **kwargs)
                finally:
                    within.discard(name)
                if name == "scale":
                    self.calls.note_scaled(value)
                elif name == "step":
                    self._reading(self.calls.stepped_with, given)
                elif name == "update":
                    count.steps += 1
                    last = scaler.events[-1].step if scaler.events else None
                    bad = last == count.steps - 1  # on a device the event comes a step later
                    self._reading(self._end_window, count.steps - 1, bad, math.inf)
                return value

            return call

        for name in (*_METHODS, "clip_grad_norm_"):
            self.patches.attribute(GradScaler, name, wrapped(name, vars(GradScaler)[name]))

    def _line_of(self, scaler: Any) -> StepLines | None:
        line = self.lines.get(scaler)
        if line is None:
            if not scaler.is_enabled():
                self.disabled.add(type(scaler).__name__)
                return None
            channel = Channel("torch", rule_of(scaler), self.recorder)
            channel.describe(scaler=f"{type(scaler).__module__}.{type(scaler).__qualname__}")
            line = self.lines[scaler] = StepLines(channel, scaler)
        return line

    def _before_scale(self, scaler: Any, line: StepLines, outputs: Any) -> None:
        line.losses.add(outputs)
        self.counted = line

    def _before_unscale(self, scaler: Any, line: StepLines, optimizer: Any) -> Seen:
        self.owners[optimizer] = line
        return self._look(optimizer)

    def _after_unscale(self, scaler: Any, line: StepLines, seen: Seen, optimizer: Any) -> None:
        seen.unscaled = True
        self._take_verdict(scaler, seen, optimizer)

    def _before_step(self, scaler: Any, line: StepLines, optimizer: Any) -> Seen:
        self.losses_used = True
        return self._before_unscale(scaler, line, optimizer)

    def _after_step(self, scaler: Any, line: StepLines, seen: Seen, optimizer: Any) -> None:
        self.looked.pop(optimizer, None)
        self.calls.stepped_with(optimizer)  # also if it was skipped
        if not seen.unscaled:
            self._take_verdict(scaler, seen, optimizer)
        line.window.append(seen)

    def _take_verdict(self, scaler: Any, seen: Seen, optimizer: Any) -> None:
        """What torch has found. Culprits are named before the script clips: a norm of NaN makes
        every gradient NaN."""
        found_inf = scaler._found_inf_per_device(optimizer).values()
        seen.found_inf = [value(x if x.dim() == 0 else x.sum()) for x in found_inf]
        if any(not isinstance(x, Tensor) and x for x in seen.found_inf):
            seen.culprits = culprits(seen.params, self._named(optimizer))
            self._search(value(scaler._get_scale_async()))

    def _search(self, scale: Number) -> None:
        """Gradients are not finite, and nothing has been written yet."""
        if isinstance(scale, Tensor):
            return  # on a device nobody knows yet whether the losses were finite
        if self.first_bad is not None and self.losses_finite():
            self.first_bad.before_step(self.counted.steps if self.counted else 0, scale)

    def losses_finite(self) -> bool:
        known = self.counted.losses if isinstance(self.counted, StepLines) else self.losses
        return known.finite and self.losses.finite

    def _before_update(self, scaler: Any, line: StepLines, new_scale: Any) -> Number:
        return value(scaler._get_scale_async())

    def _after_update(self, scaler: Any, line: StepLines, scale: Number, new_scale: Any) -> None:
        window, line.window = line.window, []
        losses, line.losses = line.losses, Losses()
        if window:
            self._finish(line, window, losses, scale, value(scaler._get_scale_async()))
            self._end_window(line.steps - 1, line.last_bad, line.last_scale)

    # Optimizers without a scaler

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._reading(self._begin, optimizer, args, kwargs, sys._getframe(1))

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._reading(self._end, optimizer, sys._getframe(1))

    # MasterWeights need not gather gradients once more for hooks that change none.
    before_step.gradlift_reads_only = after_step.gradlift_reads_only = True  # type: ignore[attr-defined]

    def _begin(self, optimizer: Any, args: Any, kwargs: Any, frame: types.FrameType) -> None:
        self.sampling.before_step(optimizer)
        if recorder.depth:  # inside a scaler's or an engine's step
            self.losses_used = True
            return
        if self.frame and any(id(f) == self.frame for f in _callers(frame)):
            return  # inside another optimizer's step
        self.frame = id(frame)
        self.calls.add_step("optimizer.step", optimizer, "closure" * _closure(args, kwargs))
        if optimizer not in self.owners or self.owners[optimizer].has_scaler:
            self._new_line(optimizer)
        self.counted = self.owners[optimizer]
        if not _closure(args, kwargs):
            self.counted.window = [self._look(optimizer)]

    def _end(self, optimizer: Any, frame: types.FrameType) -> None:
        self.sampling.after_step(optimizer, self.counted.steps if self.counted else 0)
        self.calls.stepped_with(optimizer)
        if self.first_bad is not None and not _skipped_inside(optimizer):
            self.first_bad.weights_written(optimizer)
        if recorder.depth or id(frame) != self.frame:
            return
        self.frame = 0
        line = self.owners[optimizer]
        window = line.window or [self._look(optimizer)]  # after a closure has filled in gradients
        line.window, self.losses_used = [], True
        self.looked.pop(optimizer, None)
        self._finish(line, window, self.losses, 1.0, 1.0)
        if not any(call.name == "scale" for call in self.calls.window):  # else update() ends it
            self._end_window(line.steps - 1, line.last_bad, line.last_scale)

    def _new_line(self, optimizer: Any) -> None:
        self.bare += 1
        label = f"optimizer {self.bare}" if self.bare > 1 or self.recorder.channels else ""
        channel = Channel("torch", Off(), self.recorder, label=label)
        self.owners[optimizer] = self.lines[optimizer] = StepLines(channel)

    # The loss

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.within_backward:  # checkpoints call it again
                return original(tensors, *args, **kwargs)
            self._reading(self._before_backward, tensors)
            self.within_backward = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.within_backward = False
                if self.sampling.looking and self.calls.scaled:
                    self._reading(self.edits.keep, list(self.owners))

        return backward

    def _before_backward(self, tensors: Any) -> None:
        if self.losses_used or self.frame:  # of a step that is over, or of a closure's last call
            self.losses, self.losses_used = Losses(), False
        losses = [t for t in _listed(tensors) if isinstance(t, Tensor) and t.numel() == 1]
        self.calls.add_backward(losses)
        known = len(self.losses.values)
        self.losses.add(losses)
        for optimizer, seen in list(self.looked.items()):
            if not seen.unscaled:
                del self.looked[optimizer]  # its gradients change now
        if not losses:
            return
        finite = are_finite(self.losses.values[known:])
        if self.first_bad is None:
            self._note_unsought(finite)
            return
        if finite:
            self.first_bad.answered = False
        else:
            self.first_bad.loss(losses, self.counted.steps if self.counted is not None else 0)
        self.first_bad.ends = [] if self.calls.scaled else loss_end(losses)

    def _note_unsought(self, finite: bool) -> None:
        if not finite and not self.unsought:
            self.unsought = True
            text = "the forward pass was not run again: that was switched off"
            self.recorder.event("note", None, code="untraced", text=text)

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.sampling.forward.will_compile(model)
            return original(model, *args, **kwargs)

        return compile

    # Clipping

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(parameters, *args, **kwargs)
            kept = parameters
            if isinstance(parameters, Iterator):  # can be read only once
                kept = list(parameters)
                is_generator = isinstance(parameters, types.GeneratorType)
                parameters = (p for p in kept) if is_generator else iter(kept)
            owners = self._reading(self._before_clip, kept) or [None]
            self.edits.forget()  # this change is seen as what it is
            limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
            fact = f"{limit:g}" if isinstance(limit, (int, float)) else ""
            for owner in owners:
                self.calls.add(original.__name__, owner, fact)
            return original(parameters, *args, **kwargs)

        return clip

    def _before_clip(self, parameters: Any) -> list[Any]:
        listed = _listed(parameters)
        known = self._clipped_before(listed)
        if known is None:
            known = self._owners_of(listed)
            if listed:
                self.clipped = ref(listed[0]), len(listed), len(self.owners), list(map(ref, known))
        for optimizer in known:
            self._look(optimizer)
        return known

    def _clipped_before(self, listed: list[Any]) -> list[Any] | None:
        """The owners of the parameters that the last call clipped, if these are the same."""
        if self.clipped is None or not listed:
            return None
        first, n, owners, known = self.clipped
        if first() is not listed[0] or n != len(listed) or owners != len(self.owners):
            return None
        found = [r() for r in known]
        return None if None in found or not found else found

    def _owners_of(self, listed: list[Any]) -> list[Any]:
        """The optimizers that have some of these parameters."""
        clipped = {id(p) for p in listed}
        known = [o for o in self.owners if _has_any(o, clipped)]
        owned = {id(p) for o in known for p in parameters_of(o)}
        unknown = clipped - owned - self.searched
        if unknown:
            self.searched |= unknown
            known += [o for o in living_optimizers() if o not in known and _has_any(o, clipped)]
        return known

    # Gradients

    def _look(self, optimizer: Any) -> Seen:
        """Looks at an optimizer's gradients, once a step."""
        seen = self.looked.get(optimizer)
        if seen is not None:
            return seen
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        names = self.names.setdefault(optimizer, {})
        seen = self.looked[optimizer] = Seen(params, names, _learning_rate(optimizer))
        if not params:
            return seen
        line = self.owners.get(optimizer)
        step, every = (line.steps if line else 0), self.recorder.every
        scaled = line is not None and line.has_scaler
        late = is_late(params[:1], forced=self.force_late)
        early = 0 < step < (every or 0) and step % max(1, (every or 0) // _LOOKS_PER_SAMPLE) == 0
        sampled = every is not None and (step % every == 0 or early)
        due = every is not None and (
            step < _FIRST or step % max(1, every // _LOOKS_PER_SAMPLE) == 0
        )
        wanted = due or not (scaled or (self.losses.finite and _may_be_finite(params)))
        if not (late or sampled or wanted):
            return seen
        self._named(optimizer)
        grads = [_real(dense(p.grad)) for p in params if p.grad is not None]
        if late:
            one = torch.ones((), device=grads[0].device)
            seen.look = device_look(grads, one, norm=due, amax=True)
        elif wanted:
            seen.look = look(grads, 1.0, amax=True)
            if seen.look.nonfinite and not scaled:
                seen.culprits = culprits(params, names)
                if not seen.weights_nonfinite():  # before the step writes to them
                    self._search(1.0)
        if sampled:
            seen.shares = statistics(params, grads, names)
        return seen

    def _named(self, optimizer: Any) -> dict[int, str]:
        """The names of its parameters, looked for once."""
        names, params = self.names.setdefault(optimizer, {}), list(parameters_of(optimizer))
        if any(id(p) not in names for p in params):
            name_apart(params, names, self.taken)
        return names

    # Lines

    def _finish(
        self, line: StepLines, window: list[Seen], losses: Losses, scale: Number, after: Number
    ) -> None:
        if not line.channel.described:
            optimizers = [o for o, owner in self.owners.items() if owner is line]
            names = {k: v for o in optimizers for k, v in self._named(o).items()}
            sizes = {id(p): p.numel() for o in optimizers for p in parameters_of(o)}
            line.channel.describe(parameters={names[i]: n for i, n in sizes.items()})
        line.finish(window, losses, scale, after, forced_late=self.force_late)
        if line.last_bad:
            self.sampling.look_next()
        step = line.steps - 1
        if step & (step - 1) == 0 and world_size(None) > 1:  # 0, 1, 2, 4, 8, ...
            params = [p for seen in window for p in seen.params]
            self.recorder.event("ranks", step, **fingerprint(params))

    def _end_window(self, step: int, bad: bool, scale: float) -> None:
        """Ends the window of a step that has its line."""
        self.edits.forget()
        if self.first_bad is not None:
            self.first_bad.end(step, bad)
            self.first_bad.gradients(bad, scale)
            self.first_bad.begin()
            if self.sampling.looking:
                self.first_bad.buffers(self.sampling.forward.called, step)
        self.sampling.end(step)


class Count:
    """The steps of one of gradlift's own scalers."""

    steps = 0


def _may_be_finite(params: list[Tensor]) -> bool:
    """Is the gradient finite that the backward pass reached last? NaN mostly gets there, wherever
    it began, and one small tensor costs next to nothing."""
    for p in params:
        if p.numel() <= _SMALL and p.grad is not None and p.grad.layout is torch.strided:
            return math.isfinite(local(p.grad).sum())
    return True


def _skipped_inside(optimizer: Any) -> bool:
    """Did a fused optimizer's kernel skip the step? False on a device, where nobody knows yet."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found)


def _closure(args: Any, kwargs: Any) -> bool:
    """Was step() given a closure? (`args` begins with the optimizer.)"""
    return callable(kwargs.get("closure")) or any(map(callable, args[1:2]))


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _has_any(optimizer: Any, ids: set[int]) -> bool:
    return any(id(p) in ids for p in parameters_of(optimizer))


def _learning_rate(optimizer: Any) -> float:
    """Of the first group; NaN if reading it means waiting for a device."""
    lr = optimizer.param_groups[0].get("lr", math.nan) if optimizer.param_groups else math.nan
    return math.nan if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


def _real(g: Tensor) -> Tensor:
    return torch.view_as_real(g) if g.is_complex() else g


def _callers(frame: types.FrameType) -> Iterator[types.FrameType]:
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame


def _descendants(kind: Any) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _descendants(each)
