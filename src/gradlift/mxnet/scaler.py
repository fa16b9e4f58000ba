"""`Scaler`: a trainer's loss scale, and the path of its steps.

    scale_loss -> (backward) -> trainer.step -> inspect -> decide -> update -> finish

MXNet reduces gradients and then calls `trainer._update`; that is where they are looked at. The
scale is taken out by the optimizer itself, through its `rescale_grad`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mxnet import autograd
from mxnet.contrib.amp import amp

from ..core import (
    HALF_LOSS,
    HALF_LOSS_CEILING,
    Decision,
    Limits,
    LossScale,
    LossScaleOwner,
    Note,
    Verdict,
    checked_max_norm,
    clip_coefficient,
    is_skip,
    loss_blamed,
    loss_level,
)
from ..errors import MisuseError, warn
from ..formats import FP16, FP32
from ..journal import JournalLike, channel
from ..reading import Reading
from ..rules import Off, Rule
from .finite_check import GluonLook, Gradient, look
from .loss_scaler import overflowed
from .saving import ATTRIBUTE, BeforeLoading, SavedWithTrainer, load_states, of_rule
from .trainer import (
    accumulated,
    check_half,
    check_own,
    forget,
    gradients,
    is_alone,
    keep_here,
    learning_rate,
)
from .weights import about_weights, hold_in_range
from .window import GluonWindow, check, is_half, lifted


class Scaler(LossScaleOwner):
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
        limits: Limits,
        max_norm: float | None,
        journal: JournalLike | None,
    ) -> None:
        self.max_norm = None if max_norm is None else checked_max_norm(max_norm)
        self.trainer = trainer
        self._loss_scale = LossScale(rule, limits, retries=False)
        self._channel = channel("mxnet", self.rule, journal=journal)
        self._loss_scale.listener = self._channel
        self._off = isinstance(self.rule, Off)
        self._looks = not self._off or max_norm is not None
        self._want_amax = self.rule.magnitudes or self._channel.recording
        self._original = trainer._scale  # the optimizer's own rescale_grad
        self._window = GluonWindow()
        self._warned = False
        self._outputs: Any = None
        found = getattr(trainer._optimizer, ATTRIBUTE, None)
        if of_rule(found, self.rule):  # load_states() came first
            self.load_state_dict(found)
        check_own(trainer)
        if not self._off:
            check_half(trainer)
        keep_here(trainer, must=self._looks)
        # From here on nothing is refused: what is refused leaves nothing behind.
        self._outputs = _claim_outputs()
        self._scale_outputs()
        self._save_with_trainer()
        trainer._allreduce_grads = self._reduce
        trainer._update = self._update
        trainer.load_states = self._load_states
        trainer._amp_loss_scaler = self  # scripts read its loss_scale, and set its interval

    @property
    def loss_scale(self) -> float:
        """MXNet's name for `get_scale()`."""
        return self.get_scale()

    @property
    def _scale_seq_len(self) -> int:
        """MXNet's name for the rule's `growth_interval`, which scripts set after `init_trainer`."""
        return int(getattr(self.rule, "growth_interval", 0))

    @_scale_seq_len.setter
    def _scale_seq_len(self, steps: int) -> None:
        if self.steps or not hasattr(self.rule, "growth_interval"):
            raise MisuseError(
                f"_scale_seq_len was set {'after the first step' if self.steps else ''} on the "
                f"rule '{self.rule}': give the interval to init_trainer(trainer, "
                f"'mxnet:growth_interval={steps}')"
            )
        rule = dataclasses.replace(self.rule, growth_interval=steps)  # type: ignore[type-var]
        self._loss_scale.rule = rule
        self._channel.rule = rule

    def has_overflow(self, params: Iterable[Any] | None = None) -> bool:
        """Is a gradient of these parameters (the trainer's) not finite now? Changes nothing."""
        factor = 1.0 if self._window.early is not None else self.get_scale()
        return overflowed(self.trainer._params if params is None else params, factor)

    def update_scale(self, overflow: bool) -> None:
        """MXNet's name for what `trainer.step()` does here by itself: refused."""
        raise MisuseError(
            "update_scale() was called on the scaler of a trainer, whose step() looks at the "
            "gradients and moves the scale itself: leave the call out, or write the loop by hand "
            "with gradlift.mxnet.LossScaler"
        )

    def _scale_outputs(self) -> None:
        """Ops such as SoftmaxOutput use the same scale."""
        if self._outputs is not None:
            self._outputs._loss_scale = self.get_scale()

    # scale, unscale

    def _scaled(self, loss: Any) -> Any:
        """loss * scale in float32; notes whether the loss itself was finite."""
        several = isinstance(loss, (list, tuple))
        losses = list(loss) if several else [loss]
        for each in losses:
            check(each)
        if self._off:
            if self._channel.recording:
                self._window.note(losses)
            return losses if several else loss
        if self._window.early is not None:
            self._give_up()
        if any(map(is_half, losses)):
            self._loss_scale.ceiling = HALF_LOSS_CEILING
            if not self._window.losses:  # else from the next window on
                self._loss_scale.cap(HALF_LOSS_CEILING)
                self._scale_outputs()
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
        self._window = GluonWindow()

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
            warn(
                "unscale() rounds float16 gradients to float16 once more, where small ones vanish "
                "again: to clip by norm, leave it out and use init_trainer(..., max_norm=...)"
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
            nothing = GluonLook(Reading(nonfinite=False, amax=math.nan))
            self._apply(ignore_stale_grad)
            self._finish(self._loss_scale.decide(nothing.reading), nothing, losses, share)
            return
        fresh, stale = gradients(trainer)
        if stale and not ignore_stale_grad:
            self._window = GluonWindow()
            self._apply(ignore_stale_grad)  # MXNet's own error: it names the parameter
        if not self._off:
            if not self._window.losses:
                raise MisuseError(
                    "trainer.step() was called without scale_loss(), so its gradients would be "
                    "divided by a scale they do not carry: write `with scale_loss(loss, trainer) "
                    "as scaled: autograd.backward(scaled)`, or switch scaling off with "
                    "init_trainer(..., 'off')"
                )
            check_half(trainer)
        held: list[str] = []
        alone = is_alone(trainer)
        seen = look(fresh, trainer._optimizer.rescale_grad, amax=self._want_amax)
        shown = self._shown(seen, alone)
        level = loss_level([not math.isfinite(loss) for loss in losses]) if alone else 0
        blamed = loss_blamed(level, shown.reading.nonfinite)
        reading = shown.reading._replace(loss_nonfinite=blamed)
        decision = self._loss_scale.decide(reading, loss_known=alone)
        if decision.verdict is Verdict.APPLY:
            self._fold(fresh, seen.reading.norm)
            self._apply(ignore_stale_grad)
            held = hold_in_range(trainer)
        else:
            forget(fresh)
        trainer._optimizer.rescale_grad = share  # what MXNet leaves there, without the scale
        self._finish(decision, shown, losses, share, held)

    def _shown(self, seen: GluonLook, alone: bool) -> GluonLook:
        """What the gradients show now, and what they showed before `unscale`.

        Beside other processes the early look counts only if it was at reduced gradients: the
        decision must be the same everywhere.
        """
        early = self._window.early
        if early is None:
            return seen
        if early.reading.nonfinite and (alone or self._window.early_for_all):
            return early
        whole = self._window.early_for_all or (alone and self.trainer._kvstore is None)
        norm = early.reading.norm * abs(self.trainer._optimizer.rescale_grad) if whole else math.nan
        return seen._replace(reading=seen.reading._replace(amax=early.reading.amax, norm=norm))

    def _fold(self, fresh: list[Gradient], norm: float) -> None:
        """1/scale, 1/batch_size and the clip coefficient become one factor of the optimizer's."""
        optimizer = self.trainer._optimizer
        factor = optimizer.rescale_grad
        if self.max_norm is not None:
            factor *= clip_coefficient(norm, self.max_norm)
        if abs(factor) < FP32.smallest_normal:  # MXNet refuses to read such a number: two passes
            _take_out(fresh, 1 / self.get_scale())
            rest = max(abs(factor) * self.get_scale(), FP32.smallest_normal)
            factor = math.copysign(rest, factor)
        optimizer.rescale_grad = factor

    def _apply(self, ignore_stale_grad: bool) -> None:
        self.trainer._amp_loss_scaler = None  # it was looked at: MXNet is not to look again
        try:
            type(self.trainer)._update(self.trainer, ignore_stale_grad)
        finally:
            self.trainer._amp_loss_scaler = self

    def _finish(
        self,
        decision: Decision,
        shown: GluonLook,
        losses: list[float],
        share: float,
        held: Sequence[str] = (),
    ) -> None:
        """Moves the scale, records the step, halts if a limit says so."""
        if self._channel.recording and not self._channel.described:
            # Not before the first step: shapes may be unknown until then.
            trained = [p for p in self.trainer._params if p.grad_req != "null"]
            self._channel.describe(parameters={p.name: math.prod(p.shape) for p in trained})
        bad_losses = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        named = is_skip(decision.verdict, decision.cause) and bad_losses and len(losses) > 1
        notes = [] if math.isinf(self._loss_scale.ceiling) else [HALF_LOSS]
        if shown.devices:
            notes.append(Note("devices", f"only on {', '.join(shown.devices)}"))
        if is_skip(decision.verdict, decision.cause):
            notes += about_weights(self.trainer)
        self._window = GluonWindow()
        try:
            self._loss_scale.finish(
                decision,
                loss=sum(losses) * share if losses else math.nan,
                culprits=shown.culprits,
                micro_batch=bad_losses[0] if named else None,
                notes=tuple(notes),
                held=held,
                largest=FP16.max,
                lr=learning_rate(self.trainer.optimizer),
            )
        finally:
            self._scale_outputs()

    # Saving

    def load_state_dict(self, data: Any) -> None:
        """Resumes from `state_dict()` of any adapter, or of torch's scaler; refuses what is damaged
        and then changes nothing."""
        super().load_state_dict(data)
        self._loss_scale.cap(self._loss_scale.ceiling)
        self._window = GluonWindow()  # gradients made at another scale are of no use any more
        self._scale_outputs()

    def _save_with_trainer(self) -> None:
        setattr(self.trainer._optimizer, ATTRIBUTE, SavedWithTrainer(self))

    def _load_states(self, fname: str) -> None:
        """`trainer.load_states`: the scale's state comes with the optimizer's, if it was saved."""
        before = BeforeLoading(self.trainer)
        try:
            found = load_states(self.trainer, fname)
            if found is not None:
                self.load_state_dict(found)
        except BaseException:
            before.undo()
            raise
        self._save_with_trainer()


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
