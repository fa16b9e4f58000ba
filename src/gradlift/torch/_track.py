"""One scale and its window: what `GradScaler` keeps for each key. This is the CPU's, in numbers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MisuseError
from ..formats import FP32
from ..reading import NAN, Reading
from ..rules import Rule, ScaleState
from ..verdict import Cause, Limits, StepResult, Verdict, decide
from ._agree import AMAX, CLIPS, NORM, NOT_TAKEN, Heard, Said, agree, agreed_norm, gather
from ._apply import folded_step, is_fused, take_in
from ._circle import ALONE, Circle, Sharded
from ._gradients import multiply
from ._graph import FullPrecision, leaves
from ._inspect import collect, dense, kind_of, look
from ._masters import MasterWeights
from ._names import culprits, with_told
from ._probe import claim, largest, probed, release, tell
from ._retry import Parameters
from ._shards import distributed, value_of
from ._window import Window

HALF_LOSS = "loss computed in float16: its scale is capped at 2^15"
_HALF_LOSS_CEILING = 2.0**15  # a float16 loss casts the scale itself to float16 in backward


class Facts(NamedTuple):
    """Numbers of a finished window."""

    amax: float
    nonfinite: bool
    norm: float
    loss: float
    next_scale: float
    probe_amax: float


class Track:
    """A rule's state, the losses of the current window, and one `Window` an optimizer."""

    device = torch.device("cpu")

    def __init__(
        self,
        rule: Rule,
        *,
        limits: Limits,
        key: str | None = None,
        group: Any = None,
        sharded: Sharded = False,
        names: dict[int, str] | None = None,
        allow_fp16_params: bool = False,
        want_amax: bool = False,
        want_norm: bool = False,
    ) -> None:
        self.rule, self.limits, self.key = rule, limits, key
        self.group, self.sharded = group, sharded
        self.circles: weakref.WeakKeyDictionary[Any, Circle] = weakref.WeakKeyDictionary()
        self.names = {} if names is None else names  # shared: the report may find better ones
        self.allow_fp16_params = allow_fp16_params
        self.want_amax, self.want_norm = want_amax, want_norm
        self.state = rule.init()
        self.ceiling = math.inf
        self.steps = self.skipped = 0
        self.optimizers: dict[int, weakref.ref[Any]] = {}
        self.full = FullPrecision()
        self.learned = False
        self.clear()

    def clear(self) -> None:
        """Begins a new window."""
        release(self)
        self.windows: dict[int, Window] = {}
        self.calls = 0
        self.loss: Any = 0.0
        self.losses: list[Any] = []
        """For each micro-batch: was its loss non-finite?"""
        self.flags: list[Any] = []
        """For each micro-batch: was it bad, as far as its loss or its gradients have shown?"""
        self.left_out: list[int] = []
        self.spoiled = False
        self.batches: Any = Parameters([])
        """Whose micro-batches are judged one by one."""

    # What the state is, in numbers

    def numbers(self) -> ScaleState:
        return self.state

    def put(self, state: ScaleState) -> None:
        self.state = state

    # scale

    def scaled(self, loss: Tensor) -> Tensor:
        """loss * scale, in float32 at least; notes whether the loss was finite."""
        if not loss.is_floating_point():
            raise MisuseError(f"scale() wants a floating-point loss, this is {loss.dtype}")
        if self.calls and not self.dead_for_sure():
            self.look_back(loss)
        if loss.dtype is torch.float16:
            self.cap(_HALF_LOSS_CEILING)
        self.note(loss)
        claim(self, loss)
        if self.want_amax and not self.learned:
            self.full.learn(loss)
        self.calls += 1
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide * self.factor(loss.device)

    def factor(self, device: torch.device) -> Any:
        return self.state.scale

    def note(self, loss: Tensor) -> None:
        loss = value_of(loss)
        value = loss.detach().float().sum().item() if loss.numel() != 1 else loss.item()
        self.loss += value
        dead = not math.isfinite(value)
        self.losses.append(dead)
        self.flags.append(dead)

    def dead(self, window: Window) -> Any:
        """0 if no loss of the window was dead, 2 if all were, else 1: then a loss is to blame only
        where the gradients show it, as the others may belong to another optimizer, or were given
        up. What only some ranks know of is not told: the others' scales would drift apart."""
        if not window.circle.everyone or not any(self.losses):
            return 0
        return 2 if all(self.losses) else 1

    def dead_for_sure(self) -> bool:
        """Is it settled already which micro-batch was the first bad one?"""
        return any(self.flags)

    def cap(self, ceiling: float) -> None:
        self.ceiling = ceiling
        if self.calls == 0 and self.state.scale > ceiling:
            self.state = self.state._replace(scale=ceiling)

    def look_back(self, loss: Tensor) -> None:
        """Did the micro-batch before this one leave something non-finite behind?"""
        grads = self.known_gradients(loss)
        if grads and look(grads, 1.0, amax=False).nonfinite:
            self.flags[-1] = True

    def leave_out(self, micro_batches: list[int]) -> None:
        """These were dropped: their losses no longer count, but their overflow does."""
        self.left_out = micro_batches
        self.spoiled = not all(self.losses[i] for i in micro_batches if i < len(self.losses))
        self.flags = [False] * len(self.flags)
        self.losses = [False] * len(self.losses)

    def agree_on_batch(
        self, bad: bool, found: bool, which: int, params: list[Tensor]
    ) -> tuple[bool, bool]:
        """Was a micro-batch bad on any rank, and did it leave gradients on any? A loss that was
        dead on one counts on all, or on none if nobody asks: else only some would lower their
        scale for it."""
        self.batches.param_groups[0]["params"] = params
        circle = self.circle(self.batches)
        dead = which < len(self.losses) and bool(self.losses[which])
        if circle.group is not None:
            said = torch.tensor([bad, found, dead], dtype=torch.float32, device=self.device)
            bad, found, dead = map(bool, gather(said, circle).amax(0).tolist())
        if which < len(self.losses):
            dead = dead and circle.everyone
            mine = self.losses[which]
            self.losses[which] = torch.full_like(mine, dead) if isinstance(mine, Tensor) else dead
        return bad, found

    def known_gradients(self, loss: Tensor) -> list[Tensor]:
        """Of the optimizers seen so far; before the first step, of what the loss depends on."""
        living = [o for o in (ref() for ref in self.optimizers.values()) if o is not None]
        params = [p for o in living for group in o.param_groups for p in group["params"]]
        grads = (p.grad for p in params or leaves(loss))
        return [dense(g) for g in grads if g is not None and not g.is_sparse]

    # inspect, agree

    def window(self, optimizer: Any) -> Window:
        window = self.windows.get(id(optimizer))
        if window is None:
            window = self.windows[id(optimizer)] = Window(optimizer)
        return window

    def inspect(self, window: Window, *, norm: bool = False) -> Window:
        """Looks at an optimizer's gradients: once a window, unless they were exchanged since."""
        window.just_read = False
        if window.reading is not None:
            if window.calls != self.calls:
                raise MisuseError(
                    "scale() was called after the gradients had been unscaled or clipped, so they "
                    "mix scaled and unscaled values: call unscale_() or clip_grad_norm_() once, "
                    "after the last backward() before step()"
                )
            same = all(map(is_, [p.grad for p in window.params], window.held))
            if window.unscaled:
                if not same or isinstance(window.optimizer, MasterWeights):
                    self.gather(window)
                if not same:
                    self.recheck(window)
                if norm:
                    self.take_norm(window)
                return window
            if same and not (norm and self.lacks_norm(window)):
                return window
        self.gather(window)
        window.calls = self.calls
        self.read(window, norm)
        window.just_read = True
        return window

    def gather(self, window: Window) -> None:
        window.circle = self.circle(window.optimizer)
        window.params, window.held, window.grads = self.found(window.optimizer)
        self.optimizers[id(window.optimizer)] = weakref.ref(window.optimizer)

    def circle(self, optimizer: Any) -> Circle:
        """Who decides together about this optimizer: found out once, and again if it changes."""
        if self.group is None and not distributed():
            return ALONE
        params = [p for group in optimizer.param_groups for p in group["params"]]
        circle = self.circles.get(optimizer)
        if circle is None or not circle.fits(params, self.group):
            circle = self.circles[optimizer] = Circle(params, self.group, self.sharded)
        return circle

    def found(self, optimizer: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The parameters that have a gradient, `.grad` of each, and what to look at."""
        if isinstance(optimizer, MasterWeights):
            return optimizer._find()
        steps = hasattr(optimizer, "step")  # else no update can get lost
        return collect(optimizer, self.allow_fp16_params or not steps)

    def recheck(self, window: Window) -> None:
        """Gradients put there after unscale_() are judged too. Not across ranks: only some might
        come here, and a collective that others do not join hangs."""
        alone = window.circle.group is None
        if alone and look(window.grads, 1.0, amax=False).nonfinite:
            assert window.reading is not None
            window.reading = window.reading._replace(nonfinite=True)
            window.culprits = culprits(window.params, self.names)

    def lacks_norm(self, window: Window) -> bool:
        assert window.reading is not None
        return not window.reading.nonfinite and math.isnan(window.norm)

    def take_norm(self, window: Window) -> None:
        if window.reading is not None and not window.reading.nonfinite:
            window.norm = window.look_at(1.0, set(), norm=True, amax=False).norm
            if window.circle.has_own:
                window.norm = agreed_norm(*window.own_and_shared(), window.circle)

    def read(self, window: Window, norm: bool) -> None:
        circle = window.circle
        takes = norm or self.want_norm or circle.asked_norm
        amax = self.want_amax or circle.asked_amax
        full = self.positions(window)
        window.look = found = window.look_at(1 / self.state.scale, full, norm=takes, amax=amax)
        if found.nonfinite:
            window.culprits = culprits(window.params, self.names)
        nothing_left = bool(self.left_out) and not window.grads
        dead = 2 if nothing_left and not self.spoiled else self.dead(window)
        window.norm, window.loss_known = found.norm, self.calls > 0 and circle.everyone
        reading = Reading(
            nonfinite=found.nonfinite or nothing_left,
            amax=math.inf if nothing_left else found.amax,
            loss_nonfinite=dead > 1 or (dead > 0 and found.nonfinite),
            checked=bool(window.grads) or nothing_left,
            norm=window.norm,
            probe_amax=self.probed(window),
        )
        if circle.group is not None:
            reading = self.agree(window, reading, dead, amax=amax, clips=norm)
            window.culprits = with_told(window.culprits, window.told, circle, self.names)
        window.reading = reading

    def agree(
        self, window: Window, mine: Reading, dead: Any, *, amax: bool, clips: bool
    ) -> Reading:
        """What all ranks show together; norm and culprits of the window become theirs too."""
        circle = window.circle
        own, shared = self.own_and_shared(window)
        heard = self.ask(
            Said(
                nonfinite=mine.nonfinite,
                dead=dead,
                known=window.loss_known,
                checked=mine.checked,
                amax=mine.amax if amax and mine.checked is not False else NOT_TAKEN,
                probe=NOT_TAKEN if mine.probe_amax is NAN else mine.probe_amax,
                own=own,
                shared=shared,
                culprit=self.first_bad(window),
                asks=NORM * self.want_norm + AMAX * self.want_amax + CLIPS * clips,
                scale=self.factor(self.device),
                layout=circle.layout,
            ),
            circle,
        )
        window.norm, window.loss_known, window.told = heard.norm, heard.known, heard.culprit
        return mine._replace(
            nonfinite=heard.nonfinite,
            amax=heard.amax,
            loss_nonfinite=heard.dead,
            checked=heard.checked,
            norm=heard.norm,
            probe_amax=heard.probe,
        )

    def ask(self, mine: Said, circle: Circle) -> Heard:
        return agree(mine, circle)

    def own_and_shared(self, window: Window) -> tuple[Any, Any]:
        return window.own_and_shared()

    def first_bad(self, window: Window) -> Any:
        """Of this rank: twice the position of the first culprit, plus 1 for inf or 2 for NaN."""
        if not window.culprits:
            return 0
        p = next(p for p in reversed(window.params) if p.grad is not None and kind_of(p.grad))
        return 2 * window.circle.position(p) + (2 if window.culprits[0].kind == "nan" else 1)

    def positions(self, window: Window) -> set[int]:
        """Of the gradients that are no part of amax."""
        if not self.want_amax or isinstance(window.optimizer, MasterWeights):
            return set()
        return self.full.positions(window.params)

    def probed(self, window: Window) -> Any:
        """What only some ranks hear of does not count: their scales would drift apart."""
        return probed(self, window.params) if window.circle.everyone else NAN

    # unscale, clip

    def unscale(self, window: Window) -> None:
        """Takes the scale out of the gradients now, so that they can be looked at."""
        if not window.unscaled:
            take_in(window, self.inverse())
            window.unscaled = True

    def inverse(self) -> Any:
        return 1 / self.state.scale

    def clip(self, window: Window, max_norm: float) -> Any:
        """Notes the coefficient for `step`; returns the true norm."""
        norm = torch.tensor(window.norm, dtype=torch.float32)
        if not math.isnan(window.norm):  # in float32, as torch's own clipping computes it
            window.coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
        return norm

    # decide, step

    def finish(self, window: Window, reading: Reading, retries_left: int, call: Any) -> Any:
        """Applies the step or leaves everything as it is."""
        args, kwargs = call
        if not window.grads and not self.left_out and window.circle.group is None:
            reading = Reading(nonfinite=False, amax=0.0, checked=False)
        window.verdict, window.cause = decide(
            reading,
            self.state,
            self.rule,
            self.limits,
            loss_known=window.loss_known,
            retries_left=retries_left,
        )
        window.stepped = window.verdict is not Verdict.RETRY
        if window.verdict is not Verdict.APPLY or window.done:
            return None
        inverse = 1.0 if window.unscaled else self.inverse()
        if "grad_scaler" in kwargs:  # takes the scale out by itself
            multiply(window.params, window.grads, window.coefficient)
            return window.optimizer.step(*args, **kwargs)
        factor = window.coefficient * inverse
        normal = factor >= FP32.smallest_normal
        if not normal:  # one float32 cannot hold both: two passes
            take_in(window, inverse)
            factor = window.coefficient
        if not is_fused(window.optimizer):
            take_in(window, factor)
            return window.optimizer.step(*args, **kwargs)
        return folded_step(
            window.optimizer, 1 / factor, None, *args, just_read=window.just_read, **kwargs
        )

    def result(self, window: Window, retries: int) -> StepResult:
        """What a finished window came to."""
        verdict = window.verdict or Verdict.SKIP
        bad = verdict is not Verdict.APPLY and window.cause is not Cause.NO_GRADIENTS
        return StepResult(
            verdict,
            window.cause,
            self.state.scale,
            window.norm,
            window.culprits,
            retries,
            self.micro_batch() if bad else None,
            self.notes(),
        )

    def micro_batch(self) -> int | None:
        """The first bad one of several; if none had shown by the end, it was the last."""
        if self.left_out:
            return self.left_out[0]
        if self.calls < 2:
            return None
        return next((i for i, bad in enumerate(self.flags) if bad), self.calls - 1)

    def notes(self) -> tuple[str, ...]:
        said = [] if math.isinf(self.ceiling) else [HALF_LOSS]
        if self.left_out:
            said.append(f"micro-batches left out: {self.left_out}")
        return tuple(said)

    # advance

    def combined(self) -> Reading:
        """What all optimizers of this window showed together."""
        readings = [w.reading for w in self.windows.values() if w.reading is not None]
        checked = [r for r in readings if r.checked]
        if not checked:
            return Reading(nonfinite=False, amax=0.0, checked=False)
        norms = [r.norm for r in checked]
        return Reading(
            nonfinite=any(r.nonfinite for r in checked),
            amax=max(r.amax for r in checked),
            loss_nonfinite=any(r.loss_nonfinite for r in checked),
            norm=norms[0] if len(norms) == 1 else math.hypot(*norms),
            probe_amax=largest(r.probe_amax for r in checked),
        )

    def advance(self, reading: Reading, *, retry: bool = False) -> None:
        """Moves the scale. A retry is no skip, nor is a window that left a micro-batch out."""
        reading = self.with_left_out(reading)
        tell(self, reading, self.state.scale, retry)
        self.learned = True
        state = self.rule.advance(self.state, reading)
        if retry or self.stepped_without_some():
            state = state._replace(skips=self.state.skips if retry else 0)
        elif state.skips:
            self.skipped += bool(reading.checked)
        self.state = state._replace(scale=min(state.scale, self.ceiling))

    def with_left_out(self, reading: Reading) -> Reading:
        """An overflow that was left out keeps no optimizer from its step, but moves the scale."""
        spoiled = self.spoiled and reading.checked is not False
        return reading._replace(nonfinite=True) if spoiled else reading

    def params(self) -> list[Tensor]:
        """Those that this window has looked at."""
        return [p for w in self.windows.values() for p in w.params]

    def stepped_without_some(self) -> bool:
        return self.spoiled and any(w.grads for w in self.windows.values())

    def facts(self, reading: Reading, loss: Any) -> Callable[[], Facts]:
        """What the journal wants to know of this window, after `advance`."""
        bad = bool(reading.nonfinite) and not self.stepped_without_some()
        scale, probe = self.state.scale, reading.probe_amax
        told = Facts(reading.amax, bad, reading.norm, loss, scale, probe)
        return lambda: told

    def scale_tensor(self) -> Tensor:
        return torch.tensor(self.state.scale, dtype=torch.float32)

    def skipped_steps(self) -> int:
        return self.skipped
