"""One scale and its window: what `GradScaler` keeps for each key.

    scaled -> (backward) -> inspect -> read -> agree -> finish -> end -> conclude

Where the state lives is `home`: Python numbers (`OnHost`) or tensors on a device (`OnDevice`).
Flags and numbers are theirs; the functions of a namespace take both.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core import (
    HALF_LOSS,
    HALF_LOSS_CEILING,
    Finished,
    Note,
    Verdict,
    conclude,
    decide,
    moved,
)
from ...errors import MisuseError, add_note
from ...formats import FP32
from ...namespace import namespace
from ...reading import NAN, Reading
from ..gradient_source import GradientSource, gradients_of, multiply, reference, refuse_nan
from ..names import culprits, name_of, with_first
from ..probing import claim, largest, probed, release, samples, watchers, window_ended
from ..ranks.agreement import (
    AMAX,
    CLIPS,
    NORM,
    NOT_TAKEN,
    WATCHED,
    RankRow,
    gather,
    nothing_scaled,
)
from ..ranks.group import ALONE, RankGroup
from ..ranks.sharding import distributed
from .accumulation import DropBad
from .finite_check import dense
from .graph import FullPrecision
from .on_device import OnDevice
from .on_host import OnHost
from .retrying import Parameters
from .settings import ScalerSettings
from .statistics import statistics
from .weights import about_weights
from .window import APPLIED, MicroBatch, Window, first_bad, shown

_SMALLEST_FACTOR = FP32.smallest_normal


class ChangedByHook(Exception):
    """Leaves an optimizer's step in which a hook has made a gradient non-finite."""


class Scale:
    """A rule's state, the losses of the current window, and one `Window` an optimizer."""

    def __init__(self, settings: ScalerSettings, key: str | None = None) -> None:
        self.settings, self.key = settings, key
        self.home: OnHost | OnDevice = OnHost(settings.rule.init())
        self.known: dict[int, Callable[[], Any]] = {}
        """By id: every optimizer that was inspected and still lives."""
        self.groups: dict[int, RankGroup] = {}
        """The ranks that agree on its steps."""
        self.checked: dict[int, int] = {}
        """How many parameter groups it had when its settings were checked."""
        self.ceiling = math.inf
        self.steps = 0
        self.begun = False
        """Was a loss scaled since this was made?"""
        self.due: Callable[[], Finished] | None = None
        """Reads a window of a device, which is concluded one step later."""
        self.full = FullPrecision()
        self.learned = False
        self.call = "step()"
        """The call in which gradients are looked at, for errors."""
        self.stale = False
        """Was a state loaded in mid-window, so that gradients may carry another scale?"""
        self.clear()

    def clear(self) -> None:
        """Begins a new window."""
        if watchers:
            release(self)
        self.windows: dict[int, Window] = {}
        self.calls = 0
        self.loss: Any = 0.0
        self.loss_bad = False
        """May a loss of this window be non-finite?"""
        self.micro: list[MicroBatch] = []
        self.dropped: list[int] = []
        """Micro-batches that are no part of the gradients."""
        self.none_kept_of = 0
        """How many losses had been scaled when all micro-batches had been dropped."""
        if self.home.late:
            self.home.begin()

    # Where the state is

    def move_to(self, device: torch.device) -> None:
        """From now on the state is on a device; what the window holds comes along."""
        home = self.home = OnDevice(self.home.numbers(), self.home.skipped, device)
        for m in self.micro:
            m.loss_nonfinite = torch.full((), bool(m.loss_nonfinite), device=home.device)

    def numbers(self) -> Any:
        """The state in Python numbers."""
        return self.home.numbers()

    def put(self, state: Any) -> None:
        """Sets the state by hand: ranks compare theirs at the next step."""
        self.home.put(state)
        for group in self.groups.values():
            group.compared = False

    # scale

    def scaled(self, loss: Tensor) -> Tensor:
        """loss * scale, in float32 at least; notes whether the loss was finite."""
        if not loss.is_floating_point():
            raise MisuseError(f"scale() wants a floating-point loss, this is {loss.dtype}")
        if loss.dtype is torch.float16:
            self.ceiling = HALF_LOSS_CEILING
            if not self.calls:
                self.home.cap(self.ceiling)
        self.stale, self.begun = False, True
        if self.windows:
            self._compare_marks()
            for window in self.windows.values():
                if window.finished is None and not window.deferred:
                    window.marks = window.source.marks()
        value, nonfinite = self.home.flag(loss, self.settings.recorded)
        self.loss_bad = self.loss_bad or nonfinite is not False
        self.loss = self.loss + value
        self.micro.append(MicroBatch(nonfinite))
        if watchers:
            claim(self, loss)
        if self.settings.wants_amax and not self.learned:
            self.full.learn(loss)
        self.calls += 1
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        scale = self.home.state.scale
        return wide * (scale.to(loss.device, non_blocking=True) if self.home.late else scale)

    def _compare_marks(self) -> None:
        """Did a loss that was scaled after the look add to gradients that are not stepped yet?"""
        for window in self.windows.values():
            marks, window.marks = window.marks, None
            if marks is not None:
                now = window.source.marks()
                same = len(now) == len(marks) and all(
                    g is h and n == m for (g, n), (h, m) in zip(now, marks)
                )
                window.mixed = window.mixed or not same

    # micro-batches that are dropped

    def drop(self, dropping: DropBad) -> None:
        """Its bad micro-batches are no part of the gradients: their losses no longer count, but an
        overflow among them still moves the scale."""
        for i in dropping.losses_dropped:
            self.micro[i].dropped = True
        self.dropped = dropping.dropped
        self.none_kept_of = 0 if dropping.kept else len(self.micro)

    @property
    def overflow_dropped(self) -> bool:
        """Was a micro-batch dropped whose loss was finite?"""
        return any(m.dropped and not m.loss_nonfinite for m in self.micro)

    @property
    def applied_without_some(self) -> bool:
        """Are there gradients left, though some overflowed?"""
        if not self.overflow_dropped or self.nothing_kept:
            return False
        return any(w.source.elements for w in self.windows.values())

    @property
    def nothing_kept(self) -> bool:
        """Was every micro-batch of this window dropped? Gradients may be there all the same: zeros
        of `zero_grad(set_to_none=False)`, by which momentum and weight decay would move weights."""
        return bool(self.dropped) and self.none_kept_of == len(self.micro)

    def agree_on_batch(
        self, bad: bool, found: bool, losses: range, params: list[Tensor]
    ) -> tuple[bool, bool]:
        """Was a micro-batch bad on any rank, and did it leave gradients on any? A loss that was
        non-finite on one rank counts on all, or on none if the ranks do not communicate: else only
        some would lower their scale for it."""
        group = self.group_of(Parameters(params))
        group.call = "accumulate(drop_bad=True)"
        loss_bad = any(bool(self.micro[i].loss_nonfinite) for i in losses)
        if group.group is not None:
            row = torch.tensor([bad, found, loss_bad], dtype=torch.float32, device=self.home.device)
            bad, found, loss_bad = map(bool, gather(row, group).amax(0).tolist())
        flag = loss_bad and group.sees_all_losses
        for m in (self.micro[i] for i in losses if found):
            held = m.loss_nonfinite
            m.loss_nonfinite = torch.full_like(held, flag) if isinstance(held, Tensor) else flag
        return bad, found

    def notes(self) -> tuple[Note, ...]:
        notes = [] if self.ceiling == math.inf else [HALF_LOSS]
        if self.dropped:
            notes.append(Note("micro-batches-dropped", f"micro-batches left out: {self.dropped}"))
        return tuple(notes)

    # inspect, agree

    def inspect(self, optimizer: Any, *, norm: bool = False, unscaled: bool = False) -> Window:
        """Looks at an optimizer's gradients: once a window, and again at those that changed.
        `unscaled`: somebody else has taken the scale out of them."""
        window = self.windows.get(id(optimizer))
        first = window is None
        if self.stale:
            raise MisuseError(
                "load_state_dict() came between scale() and step(), so these gradients carry a "
                "scale that is not known any more: call zero_grad() and compute the batch again"
            )
        if self.windows:
            self._compare_marks()
        if window is not None:
            if window.mixed:
                raise MisuseError(
                    "gradients of this optimizer changed after they had been unscaled or clipped, "
                    "while another loss was scaled, so they mix scaled and unscaled values: call "
                    "unscale_() or clip_grad_norm_() after the last backward() that reaches them, "
                    "and change them by hand right after that"
                )
            window.fresh = False
            window.norm_shown = window.norm_shown or norm
            changed = window.source.changed()
            alone = window.group.group is None
            if changed and norm and not window.unscaled and not alone:
                raise MisuseError(
                    "gradients were changed after clip_grad_norm_() had measured them, and now "
                    "their norm is asked for again, which other ranks may not do: call unscale_(), "
                    "change them, then call clip_grad_norm_() or step(max_norm=...)"
                )
            lacks_norm = norm and self.home.lacks_norm(window)
            if window.unscaled or not (lacks_norm or (changed and alone)):
                if changed:
                    self._look_again(window)
                if norm and window.unscaled:
                    self._take_norm(window)
                return window
        window = self._gather(optimizer, window)
        window.unscaled = window.unscaled or unscaled
        if self.windows:
            self._refuse_shared(window)
        self._read(window, norm)
        window.fresh = True
        self.windows[id(optimizer)] = window
        if first and self.settings.recorded and window.source.elements:
            self._describe(window)
        return window

    def _refuse_shared(self, window: Window) -> None:
        """A gradient that another optimizer of this window has unscaled, or will."""
        mine = {id(p): p for p in window.source.params}
        for other in self.windows.values():
            shared = mine.keys() & {id(p) for p in other.source.params}
            if other is not window and shared:
                name = name_of(mine[shared.pop()], self.settings.names)
                raise MisuseError(
                    f"{name} is in two optimizers that step in one window, so its gradient would "
                    "be unscaled twice: keep it in one of them, or call update() in between and "
                    "compute the gradients again"
                )

    def _gather(self, optimizer: Any, window: Window | None) -> Window:
        checked, groups = self.checked.get(id(optimizer)), len(optimizer.param_groups)
        group = self.group_of(optimizer)
        if window is None:
            window = Window(gradients_of(optimizer, self.settings.allow_fp16_params))
            if checked != groups:
                window.source.check_settings()
                self.checked[id(optimizer)] = groups
            if checked is None:
                self.settings.unnamed.append(reference(optimizer))
        elif window.unscaled and checked != groups:
            raise MisuseError(
                "a parameter group was added after unscale_(), so its gradients still carry the "
                "scale: call update() and zero_grad(), and compute the batch again"
            )
        window.group = group
        window.source.find(by_parameter=self.home.late, spread=group is not ALONE)
        return window

    def group_of(self, optimizer: Any) -> RankGroup:
        """The ranks that agree on its steps: found out once, and again if they change."""
        settings, group = self.settings, self.groups.get(id(optimizer), ALONE)
        if settings.group is None and not distributed():
            group = ALONE
            if settings.replicas != 1:
                settings.use_replicas(1)
        else:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if group is ALONE or not group.fits(params, settings.group):
                group = RankGroup(params, settings.group, settings.sharded)
                settings.use_replicas()
        if id(optimizer) not in self.known:
            forget = functools.partial(_forget, weakref.ref(self), id(optimizer))
            self.known[id(optimizer)] = reference(optimizer, forget)
        self.groups[id(optimizer)] = group
        return group

    @property
    def optimizers(self) -> list[Any]:
        """All that were inspected."""
        found = [held() for held in self.known.values()]
        return [optimizer for optimizer in found if optimizer is not None]

    def _read(self, window: Window, norm: bool) -> None:
        """One look at the gradients, by this rank and by all: `window.reading`."""
        settings, home, group = self.settings, self.home, window.group
        window.norm_taken = norm or settings.recorded or group.asked_norm
        free = not (home.late or settings.rule.magnitudes)  # the check is the norm
        window.norm_shown = norm or free or not settings.watched or group.shows_norm
        amax = settings.wants_amax or group.asked_amax
        losses: list[Any] = []
        if self.loss_bad and group.sees_all_losses:
            losses = [m.loss_nonfinite for m in self.micro if not m.dropped]
        window.loss_known = self.calls > 0 and group.sees_all_losses
        if group.group is None and window.source.elements and not self._scaled:
            raise MisuseError(nothing_scaled(self.call))
        leaves_out = settings.wants_amax and not window.source.gathered
        nothing_left = bool(self.dropped) and (not window.source.elements or self.nothing_kept)
        if window.source.elements or not home.late:
            window.found = found = home.look(
                window,
                self.full.positions(window.source.params) if leaves_out else set(),
                norm=window.norm_taken,
                amax=amax,
                clips=norm,
            )
            window.norm = found.norm
            if not home.late and found.nonfinite:
                window.culprits = culprits(window.source.params, settings.names)
            reading = Reading(
                found.nonfinite, found.amax, norm=found.norm, checked=bool(window.source.elements)
            )
        else:
            window.found = None
            reading = Reading(nonfinite=False, amax=0.0, checked=False)
        if nothing_left:  # every micro-batch was dropped
            bad = reading.nonfinite | True  # a tensor on a device
            reading = reading._replace(nonfinite=bad, amax=math.inf, checked=True)
        all_lost = nothing_left and not self.overflow_dropped
        if group.group is None:
            blamed = all_lost
            if losses and not all_lost:
                blamed = home.blamed(losses, reading.nonfinite)
            probe = self._probed(window) if watchers else NAN
            window.reading = reading._replace(loss_nonfinite=blamed, probe_amax=probe)
            return
        level = 2 if all_lost else home.level(losses)
        self._agree(window, reading, level, amax=amax, clips=norm)

    def _agree(self, window: Window, mine: Reading, level: Any, *, amax: bool, clips: bool) -> None:
        """What all ranks show together becomes this one's reading, norm and culprit."""
        group, probe = window.group, self._probed(window)
        group.call = self.call
        agreed = self.home.agree(
            window,
            RankRow(
                nonfinite=mine.nonfinite,
                loss_level=level,
                scaled=self._scaled,
                checked=mine.checked,
                amax=mine.amax if amax and mine.checked is not False else NOT_TAKEN,
                probe_amax=NOT_TAKEN if probe is NAN else probe,
                asks=self._asks() + CLIPS * clips,
                scale=self.home.state.scale,
                layout=group.layout,
            ),
        )
        window.reading, window.loss_known, window.first_culprit = agreed
        window.norm = agreed.reading.norm
        if not self.home.late and agreed.culprit:
            names = self.settings.names
            window.culprits = with_first(window.culprits, agreed.culprit, group, names)

    @property
    def _scaled(self) -> int:
        """In this window: 2 if a loss was, 1 if it may have been by hand, else 0."""
        return 2 if self.calls else int(self.settings.by_hand)

    def _asks(self) -> int:
        """What this rank wants to know of all: for its journal, or for its rule."""
        settings = self.settings
        asks = NORM * settings.recorded if not settings.watched else WATCHED
        return asks + AMAX * settings.wants_amax

    def _probed(self, window: Window) -> Any:
        """What only some ranks have probed does not count: their scales would drift apart."""
        if not window.group.sees_all_losses:
            return NAN
        peak = probed(self, window.source.params)
        if self.home.late and isinstance(peak, Tensor):
            return peak.to(self.home.device, non_blocking=True)
        return peak

    def _look_again(self, window: Window) -> None:
        """Looks at those gradients that were changed after the look. Across ranks only some might
        come here, and a collective that others do not join hangs: a bad change is an error."""
        source, reading = window.source, window.reading
        noted, before = source.noted, source.params
        self._gather(source.optimizer, window)
        changed = source.changed_at(noted)
        if not changed or reading is None:
            return
        if list(map(id, before)) != list(map(id, source.params)):
            window.found = None  # its positions hold no longer
        bad = self.home.look_again(window, changed)
        if window.group.group is not None:
            if bool(bad) and not bool(reading.nonfinite):
                raise MisuseError(_bad_change(source, changed, self.settings.names))
            return
        if not self.home.late and bad and not window.culprits:
            window.culprits = culprits(source.params, self.settings.names, source.each())
        bad = namespace(self.home.xp).or_(reading.nonfinite, bad)
        window.reading = reading._replace(nonfinite=bad, checked=True)

    def _after_hooks(self, window: Window) -> None:
        """Inside optimizer.step(), after the hooks of others: they may have changed gradients."""
        if window.source.changed():
            self._look_again(window)
            if window.source.gathered:
                window.source.optimizer._just_taken = True
            if window.reading is not None and bool(window.reading.nonfinite):
                window.changed_by_hook = True
                raise ChangedByHook

    def _take_norm(self, window: Window) -> None:
        """The norm of gradients that were unscaled before somebody asked for it."""
        assert window.reading is not None
        if not self.home.late and window.reading.nonfinite:
            return
        if window.source.elements or not self.home.late:
            window.found = self.home.look(window, set(), norm=True, amax=False, clips=False)
            window.norm = window.found.norm
        if window.group.has_shards:
            window.norm_taken = True
            row = RankRow(False, 0, self._scaled, 0, asks=self._asks(), scale=self.home.state.scale)
            window.norm = self.home.agree(window, row).reading.norm

    def _describe(self, window: Window) -> None:
        """Before the first line of a journal: names and sizes; every so often, statistics of the
        gradients as scaled."""
        settings, channel = self.settings, self.settings.channel
        if not channel.described:
            sizes = {name_of(p, settings.names): p.numel() for p in window.source.params}
            channel.describe(parameters=sizes)
        if channel.sample_due(self.steps):
            grads = [dense(g) for g in window.source.held]
            channel.sample(self.steps, statistics(window.source.params, grads, settings.names))

    # unscale, clip, step

    def finish(
        self,
        window: Window,
        call: Any = ((), {}),
        *,
        retries_left: int = 0,
        retries: int = 0,
        done: bool = False,
    ) -> Any:
        """Decides, and applies the step or leaves everything as it is; `window.finished` says what
        came of it. `done`: the optimizer has moved the weights already, in its closure."""
        home, settings, source = self.home, self.settings, window.source
        args, kwargs = call
        if not source.elements and window.group.group is None and not self.dropped:
            window.reading = Reading(nonfinite=False, amax=0.0, checked=False)
        assert window.reading is not None
        reading, value, cause = window.reading, None, None
        if not done:
            refuse_nan(source.optimizer)
            source.hooked = source.has_hooks()
            if source.hooked:
                source.after_hooks = functools.partial(self._after_hooks, window)
        waits = retries_left or done or "grad_scaler" in kwargs or window.changed_by_hook
        if home.late and not waits and source.elements and source.folds and not source.must_know:
            try:
                value = self._folded(window, reading, args, kwargs)
            except ChangedByHook:
                return self.finish(window, call, retries=retries)
            except Exception as error:
                _half_way(error, source)
                raise
        elif not (home.late and done and source.folds):  # else its kernel has decided
            seen, state, known = reading, home.state, window.loss_known
            if home.late:
                seen, state, known = home.read(window)
            window.verdict, cause = decide(
                seen,
                state,
                settings.rule,
                settings.limits,
                loss_known=known,
                retries_left=retries_left,
            )
            if window.verdict is Verdict.APPLY and not done:
                try:
                    value = self._apply(window, args, kwargs)
                except ChangedByHook:  # before anything was written: decided anew
                    return self.finish(window, call, retries_left=retries_left, retries=retries)
                except Exception as error:
                    _half_way(error, source)
                    raise
        which, failed = None, not home.late and cause not in APPLIED
        if failed:
            which = first_bad([m.loss_nonfinite for m in self.micro], self.dropped)
        finished = Finished(
            self.steps,
            home.state,
            home.state.scale,
            reading._replace(norm=window.norm),
            cause,  # type: ignore[arg-type]
            culprits=window.culprits,
            retries=retries,
            micro_batch=which,
            notes=self.notes() if self.dropped or self.ceiling < math.inf else (),
            key=self.key or "",
        )
        window.finished = finished
        if home.late:
            optimizer_of = self.known[id(source.optimizer)]
            window.finished = home.later(
                finished, window, settings, self.micro, self.dropped, optimizer_of
            )
        elif failed or (source.gathered and source.out_of_range()):
            window.finished = about_weights(finished, source, settings.names)
        return value

    def _folded(self, window: Window, reading: Reading, args: Any, kwargs: Any) -> Any:
        """A fused optimizer on a device is handed scale and verdict, and nothing waits."""
        scale = self.home.state.scale
        grad_scale = torch.ones_like(scale) if window.unscaled else scale
        if isinstance(window.coefficient, Tensor):
            grad_scale = grad_scale / window.coefficient
        bad = namespace(torch).or_(reading.nonfinite, reading.loss_nonfinite)
        bad = torch.as_tensor(bad, dtype=scale.dtype, device=scale.device)  # or a plain True
        return window.source.step(grad_scale, bad, *args, **kwargs)

    def _apply(self, window: Window, args: Any, kwargs: Any) -> Any:
        """One factor, 1/scale x clip coefficient: folded into the optimizer where it can take it,
        else multiplied in."""
        source, coefficient, home = window.source, window.coefficient, self.home
        if "grad_scaler" in kwargs:  # takes the scale out by itself
            multiply(source.params, source.elements, coefficient)
            source.note()
            return source.plain_step(*args, **kwargs)
        if home.late:
            factor = coefficient if window.unscaled else home.inverse() * coefficient
            return self._multiplied_step(window, factor, args, kwargs)
        divisor = 1.0 if window.unscaled else home.state.scale
        if coefficient < divisor * _SMALLEST_FACTOR:  # one float32 cannot hold both: two passes
            source.multiply(home.inverse())
            window.unscaled, divisor = True, 1.0
        if source.folds:
            return source.step(divisor / coefficient, None, *args, just_read=window.fresh, **kwargs)
        inverse = 1.0 if window.unscaled else home.inverse()
        return self._multiplied_step(window, inverse * coefficient, args, kwargs)

    def _multiplied_step(self, window: Window, factor: Any, args: Any, kwargs: Any) -> Any:
        try:
            return window.source.multiplied_step(factor, *args, **kwargs)
        except Exception:
            if not window.source.gathered:  # multiplied already: `step` may be called again
                window.unscaled, window.coefficient = True, 1.0
                window.source.note()
            raise

    # the end of a window

    def combined(self) -> Reading:
        """What all optimizers of this window showed together."""
        readings = [w.reading for w in self.windows.values() if w.reading is not None]
        if all(r is readings[0] for r in readings):  # one, or carried out together
            return readings[0]
        checked = [r for r in readings if r.checked is not False]
        if not checked:
            return Reading(nonfinite=False, amax=0.0, checked=False)
        if len(checked) == 1:
            return checked[0]
        ns, late = namespace(self.home.xp), self.home.late
        maximum, hypot = (torch.maximum, torch.hypot) if late else (max, math.hypot)
        whole = checked[0]
        for r in checked[1:]:
            taken = self.settings.recorded or not late
            whole = Reading(
                ns.or_(whole.nonfinite, r.nonfinite),
                r.amax if whole.amax is r.amax else maximum(whole.amax, r.amax),
                ns.or_(whole.loss_nonfinite, r.loss_nonfinite),
                True,
                hypot(whole.norm, r.norm) if taken else math.nan,
                largest((whole.probe_amax, r.probe_amax)),
            )
        return whole

    def advance(self, reading: Reading, *, retry: bool = False) -> Reading:
        """Moves the scale; returns the reading that is recorded. A retry is no skip, nor is a step
        that was applied without some of its micro-batches."""
        home, seen, without_some = self.home, reading, False
        if self.dropped and self.overflow_dropped and reading.checked is not False:
            seen = reading._replace(nonfinite=True)
            if self.applied_without_some:
                ns = namespace(home.xp)
                without_some = ns.not_(ns.or_(reading.nonfinite, reading.loss_nonfinite))
        if watchers:
            window_ended(self, seen, home.state.scale, retry)
        self.learned = True
        after = moved(
            self.settings.rule,
            home.state,
            seen,
            retry=retry,
            dropped=without_some,
            ceiling=self.ceiling,
            xp=home.xp,
        )
        counts = not retry and reading.checked is not False
        home.move(after, after.skips > 0 if counts else False)
        return reading

    def carry_out_deferred(self) -> Window | None:
        """skip="all": steps that waited for all optimizers' gradients; the last of them."""
        waiting = [
            w for w in self.windows.values() if w.deferred is not None and w.finished is None
        ]
        for window in waiting:
            if window.source.changed():
                self._look_again(window)
        reading = self.combined() if waiting else None
        for window in waiting:
            window.fresh, window.reading = False, reading
            self.finish(window, window.deferred)
        return waiting[-1] if waiting else None

    def end(
        self, by_hand: tuple[Any, Any] | None = None
    ) -> Finished | Callable[[], Finished] | None:
        """Moves the scale and begins a new window; what there is to conclude of the old one, or
        how a device's numbers are read. `by_hand`: scale and count of clean steps are these.

        The first optimizer's step that was not applied stands for the window, else the last.
        """
        windows = list(self.windows.values())
        if not windows:
            return None
        self.settings.by_hand = False
        reading = self.combined() if len(windows) > 1 else windows[0].reading
        assert reading is not None
        reading = self.advance(reading)
        if by_hand is not None:
            self.put(self.home.state._replace(scale=by_hand[0], clean=by_hand[1]))
        if watchers and self.settings.recorded and (modules := samples(self.params())):
            self.settings.channel.probe(self.steps, modules)
        finished: list[Any] = [w.finished for w in windows if w.finished is not None]
        ended: Any = None
        if finished and (self.settings.observed or not self.home.late):
            lr, loss = _learning_rate(windows), self.loss if self.calls else math.nan
            if self.home.late:
                ended = self.home.ended(finished, reading, loss, lr)
            else:
                done = shown(finished) if len(finished) > 1 else finished[0]
                scale = self.home.state.scale
                ended = done._replace(reading=reading, next_scale=scale, lr=lr, loss=loss)
        self.steps += 1
        self.clear()
        return ended

    def conclude(self, ended: Finished | Callable[[], Finished] | None) -> None:
        """Records a window and enforces limits: at once, or on a device one step later."""
        if callable(ended):
            ended, self.due = self.due, ended
        if ended is not None:
            settings = self.settings
            done = ended() if callable(ended) else ended
            if self.home.late:  # else every step's event is known
                settings.channel.keeps_events = settings.known
            conclude(done, settings.rule, settings.limits, settings.channel)

    def params(self) -> list[Tensor]:
        """Those that this window has looked at."""
        return [p for w in self.windows.values() for p in w.source.params]


def _forget(scale_of: Callable[[], Scale | None], key: int, _: Any) -> None:
    """An optimizer is gone; another may get its id."""
    scale = scale_of()
    if scale is not None:
        for held in (scale.known, scale.groups, scale.checked):
            held.pop(key, None)


def _half_way(error: Exception, source: GradientSource) -> None:
    """Says in what state a step that raised has left the weights."""
    if isinstance(error, MisuseError):  # before anything was written
        return
    kind = type(source.optimizer).__name__
    add_note(
        error,
        f"gradlift: {kind}.step() raised this before it was through. {source.half_way} step() may "
        "be called again with the same gradients; to repeat the step exactly, load the weights and "
        "the optimizer from a checkpoint first",
    )


def _bad_change(source: GradientSource, changed: list[int], names: dict[int, str]) -> str:
    each = source.each()
    bad = culprits([source.params[i] for i in changed], names, [each[i] for i in changed])
    return (
        f"the gradient of {bad[0]} was changed after it had been checked and is now {bad[0].kind}. "
        "The other ranks do not know that, so nothing was written: make the change before "
        "unscale_() or clip_grad_norm_(), or keep it finite"
    )


def _learning_rate(windows: list[Window]) -> float:
    """Of the first optimizer's first group, NaN if there is none."""
    for window in windows:
        for group in window.source.optimizer.param_groups:
            return float(group.get("lr", math.nan))
    return math.nan
