"""`Scaler`: a trainer's loss scale, and the path of its steps.

    scale_loss -> (backward) -> trainer.step -> inspect -> decide -> update -> advance -> record

MXNet reduces gradients and then calls `trainer._update`; that is where they are looked at. The
scale is taken out by the optimizer itself, through its `rescale_grad`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from mxnet import autograd
from mxnet.contrib.amp import amp

from ..errors import MisuseError, SettingsError, TrainingHalted
from ..formats import FP32
from ..journal import JournalLike, opened
from ..reading import Reading
from ..rules import Off, Rule, ScaleState, parse
from ..rules._presets import cautious
from ..verdict import Cause, Limits, StepResult, Verdict, decide, explain_halt
from . import _saved
from ._inspect import Gradient, Look, look
from ._record import Recorder
from ._trainer import (
    accumulated,
    check_half,
    check_own,
    forget,
    gradients,
    is_alone,
    keep_here,
)
from ._window import Window, check, is_half, lifted

HALF_LOSS = "loss computed in float16: its scale is capped at 2^15"
_HALF_LOSS_CEILING = 2.0**15  # a float16 loss casts the scale itself to float16 in backward


class Scaler:
    """What `init_trainer` returns: the scale, and what became of the last step.

    >>> import mxnet as mx
    >>> from gradlift.mxnet import init_trainer, scale_loss
    >>> weight = mx.gluon.Parameter("weight", shape=2)
    >>> weight.initialize(mx.init.One())
    >>> trainer = mx.gluon.Trainer([weight], "sgd", {"learning_rate": 0.5})
    >>> scaler = init_trainer(trainer)
    >>> with mx.autograd.record(), scale_loss(weight.data().sum(), trainer) as scaled:
    ...     scaled.backward()
    >>> trainer.step(1)
    >>> print(scaler.result)
    apply at scale 2^16, norm 1.414
    >>> scaler.steps, scaler.skipped_steps
    (1, 0)
    """

    def __init__(
        self,
        trainer: Any,
        rule: Rule | str | float,
        *,
        max_norm: float | None = None,
        max_consecutive_skips: int | None = None,
        on_floor: str = "hold",
        journal: JournalLike | None = None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise SettingsError(f"max_norm is {max_norm!r}, expected a number above 0")
        # Nothing retries in a Gluon loop.
        self.rule = (cautious(rule) if isinstance(rule, str) else None) or parse(rule)
        self.limits = Limits(max_consecutive_skips, on_floor)
        self.max_norm, self.trainer = max_norm, trainer
        self.result: StepResult | None = None
        self.steps = self.skipped_steps = 0
        self._off = isinstance(self.rule, Off)
        self._looks = not self._off or max_norm is not None
        self._original = trainer._scale  # the optimizer's own rescale_grad
        record = opened(journal)
        self._recorder = Recorder(record, self.rule) if record is not None else None
        self._want_amax = self.rule.magnitudes or record is not None
        self._ceiling = math.inf
        self._window = Window()
        self._warned = False
        self._outputs: Any = None
        self._state = self.rule.init()
        found = getattr(trainer._optimizer, _saved.ATTRIBUTE, None)
        if _saved.belongs(found, self.rule):  # load_states() came first
            self.load_state_dict(found)
        check_own(trainer)
        if not self._off:
            check_half(trainer)
        keep_here(trainer, must=self._looks)
        # From here on nothing is refused: what is refused leaves nothing behind.
        self._outputs = _claim_outputs()
        self._put(self._state)
        self._travel()
        trainer._allreduce_grads = self._reduce
        trainer._update = self._update
        trainer.load_states = self._load_states

    @property
    def state(self) -> ScaleState:
        """The rule's state, of which the scale is a part."""
        return self._state

    def _put(self, state: ScaleState) -> None:
        self._state = state._replace(scale=min(state.scale, self._ceiling))
        if self._outputs is not None:
            self._outputs._loss_scale = self._state.scale

    def get_scale(self) -> float:
        """The scale of the next loss."""
        return float(self.state.scale)

    @property
    def loss_scale(self) -> float:
        """MXNet's name for `get_scale()`."""
        return self.get_scale()

    # scale, unscale

    def _scaled(self, loss: Any) -> Any:
        """loss * scale in float32; notes whether the loss itself was finite."""
        several = isinstance(loss, (list, tuple))
        losses = list(loss) if several else [loss]
        for each in losses:
            check(each)
        if self._off:
            if self._recorder is not None:
                self._window.note(losses)
            return losses if several else loss
        if self._window.early is not None:
            self._give_up()
        if any(map(is_half, losses)):
            self._ceiling = _HALF_LOSS_CEILING
            if not self._window.losses:
                self._put(self.state)
        self.trainer._scale = self._original / self.get_scale()
        self._window.note(losses)
        with autograd.record(train_mode=autograd.is_training()):
            scaled = [lifted(each) * self.get_scale() for each in losses]
        return scaled if several else scaled[0]

    def _give_up(self) -> None:
        """What was unscaled will not be used: the next backward writes over it, or it is zero."""
        if accumulated(self.trainer):
            raise MisuseError(
                "scale_loss() was called after unscale(), so that gradients with the scale would "
                "be added to gradients without: call unscale() once, after the last backward() "
                "before trainer.step(). To give a batch up, call zero_grad() on its parameters"
            )
        forget(gradients(self.trainer)[0])
        self._window = Window()

    def _unscale(self) -> None:
        """Takes the scale out of the gradients now, and looks at them before anybody clips them."""
        if self._off or self._window.early is not None:
            return
        if not self._window.losses:
            raise MisuseError(
                "unscale() was called before scale_loss(): there is no scale to take out of these "
                "gradients"
            )
        fresh, _ = gradients(self.trainer)
        self._window.early = look(fresh, self.trainer._scale, amax=self._want_amax)
        self._window.early_for_all = self._window.reduced
        _take_out(fresh, self.trainer._scale)
        self.trainer._scale = 1.0
        if any(is_half(g.grad) for g in fresh) and not self._warned:
            self._warned = True
            warnings.warn(
                "unscale() rounds float16 gradients to float16 once more, where small ones vanish "
                "again: to clip by norm, leave it out and use init_trainer(..., max_norm=...)",
                stacklevel=3,
            )

    # What MXNet calls: reduce; then inspect, decide, step

    def _reduce(self) -> None:
        type(self.trainer)._allreduce_grads(self.trainer)
        self._window.reduced = True

    def _update(self, ignore_stale_grad: bool = False) -> None:
        trainer = self.trainer
        check_own(trainer)
        losses = self._window.read()
        share = self._original * trainer._optimizer.rescale_grad / trainer._scale
        if not self._looks:
            self._apply(ignore_stale_grad)
            reading = Reading(nonfinite=False, amax=math.nan)
            self._finish(reading, Verdict.APPLY, Cause.NONE, _NOTHING, losses, share)
            return
        fresh, stale = gradients(trainer)
        if stale and not ignore_stale_grad:
            self._window = Window()
            self._apply(ignore_stale_grad)  # MXNet's own error: it names the parameter
        if not self._off:
            self._check_window()
            check_half(trainer)
        alone = is_alone(trainer)
        seen = look(fresh, trainer._optimizer.rescale_grad, amax=self._want_amax)
        shown = self._shown(seen, alone)
        reading = Reading(
            shown.nonfinite,
            shown.amax,
            loss_nonfinite=alone and _blamed(losses, shown.nonfinite),
            checked=bool(fresh),
            norm=shown.norm,
        )
        verdict, cause = decide(reading, self.state, self.rule, self.limits, loss_known=alone)
        if verdict is Verdict.APPLY:
            self._fold(fresh, seen.norm)
            self._apply(ignore_stale_grad)
        else:
            forget(fresh)
        trainer._optimizer.rescale_grad = share  # what MXNet leaves there, without the scale
        self._finish(reading, verdict, cause, shown, losses, share)

    def _check_window(self) -> None:
        if not self._window.losses:
            raise MisuseError(
                "trainer.step() was called without scale_loss(), so its gradients would be divided "
                "by a scale they do not carry: write `with scale_loss(loss, trainer) as scaled: "
                "autograd.backward(scaled)`, or switch scaling off with init_trainer(..., 'off')"
            )

    def _shown(self, seen: Look, alone: bool) -> Look:
        """What the gradients show now, and what they showed before `unscale`.

        Beside other processes the early look counts only if it was at reduced gradients: the
        decision must be the same everywhere.
        """
        early = self._window.early
        if early is None:
            return seen
        if early.nonfinite and (alone or self._window.early_for_all):
            return early
        norm = early.norm * abs(self.trainer._optimizer.rescale_grad)
        whole = self._window.early_for_all or (alone and self.trainer._kvstore is None)
        return seen._replace(
            amax=early.amax, norm=norm if whole and not seen.nonfinite else math.nan
        )

    def _fold(self, fresh: list[Gradient], norm: float) -> None:
        """1/scale, 1/batch_size and the clip coefficient become one factor of the optimizer's."""
        optimizer = self.trainer._optimizer
        factor = optimizer.rescale_grad
        if self.max_norm is not None and norm > self.max_norm:
            factor *= self.max_norm / norm
        if abs(factor) < FP32.smallest_normal:  # MXNet refuses to read such a number: two passes
            _take_out(fresh, 1 / self.get_scale())
            rest = max(abs(factor) * self.get_scale(), FP32.smallest_normal)
            factor = math.copysign(rest, factor)
        optimizer.rescale_grad = factor

    def _apply(self, ignore_stale_grad: bool) -> None:
        type(self.trainer)._update(self.trainer, ignore_stale_grad)

    # advance, record

    def _finish(
        self,
        reading: Reading,
        verdict: Verdict,
        cause: Cause,
        shown: Look,
        losses: list[float],
        share: float,
    ) -> None:
        before = self.state
        self._put(self.rule.advance(before, reading))
        failed = verdict is not Verdict.APPLY and cause is not Cause.NO_GRADIENTS
        dead = [i for i, loss in enumerate(losses) if math.isnan(loss)]
        bad = shown.culprits
        result = self.result = StepResult(
            verdict,
            cause,
            before.scale,
            reading.norm,
            bad,
            micro_batch=dead[0] if failed and dead and len(losses) > 1 else None,
            notes=self._notes(shown),
        )
        if failed:
            self.skipped_steps += 1
        if self._recorder is not None:
            loss = math.fsum(losses) * share if losses else math.nan
            self._recorder.step(self.trainer, self.steps, result, reading, loss, self.get_scale())
        if cause is Cause.FLOOR and self.limits.on_floor == "warn":
            warnings.warn(
                f"overflow at the smallest scale, {before.scale:g}: the step was skipped and the "
                f"scale held. First non-finite gradient: {bad[0] if bad else 'unknown'}",
                stacklevel=4,
            )
        step, self.steps = self.steps, self.steps + 1
        self._window = Window()
        if verdict is Verdict.HALT:
            raise TrainingHalted(explain_halt(cause, before, self.rule, step=step, culprits=bad))

    def _notes(self, shown: Look) -> tuple[str, ...]:
        notes = [] if math.isinf(self._ceiling) else [HALF_LOSS]
        if shown.devices:
            notes.append(f"only on {', '.join(shown.devices)}")
        return tuple(notes)

    # saving

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, JSON-able; `trainer.save_states` saves it too."""
        return _saved.dump(self)

    def load_state_dict(self, data: Any) -> None:
        """Resumes from `state_dict()`; refuses what is damaged and then changes nothing."""
        state, self.steps, self.skipped_steps = _saved.checked(data, self.rule)
        self._window = Window()  # gradients made at another scale are of no use any more
        self._put(state)

    def _travel(self) -> None:
        setattr(self.trainer._optimizer, _saved.ATTRIBUTE, _saved.Travelling(self))

    def _load_states(self, fname: str) -> None:
        """`trainer.load_states`: the scale's state comes with the optimizer's, if it was saved."""
        found = _saved.in_file(fname)
        if found is not None:
            _saved.checked(found, self.rule)  # before anything is changed
        type(self.trainer).load_states(self.trainer, fname)
        self._travel()
        if found is not None:
            self.load_state_dict(found)


_NOTHING = Look(False, math.nan, math.nan)


def _blamed(losses: list[float], nonfinite: bool) -> bool:
    """Is a dead loss to blame? If only some of the window's were dead, only where the gradients
    show it: the others may have been given up."""
    dead = [math.isnan(loss) for loss in losses]
    return any(dead) and (all(dead) or nonfinite)


def _take_out(fresh: list[Gradient], factor: float) -> None:
    with autograd.pause():
        for g in fresh:
            grad = g.grad
            if is_half(grad):  # the factor may be no float16 number
                grad[:] = (grad.astype("float32") * factor).astype("float16")
            else:
                grad *= factor


def _claim_outputs() -> Any:
    """After `amp.init()`, ops such as SoftmaxOutput take their scale from a scaler of MXNet's, that
    of the first trainer: it is made to follow ours."""
    if not amp._amp_initialized or amp._amp_loss_scale_initialized:
        return None
    amp._amp_loss_scale_initialized = True
    return amp._loss_scaler
