"""Oracle for trace-equality tests: the peers' scale rules, each re-told in a few lines.

    peer = Megatron(init_scale=8.0, growth_interval=3)
    peer.scale                       # what the next step multiplies its loss by
    peer.update(overflow=True)       # what the peer does after that step

Class attributes are the settings, at the peer's defaults, and the initial counters. No code is
shared with `gradlift`. A peer with one factor, or a fixed one, takes both factors here (it divides,
we multiply: the same bits for powers of two). `_Single` peers hold the scale in a float32 tensor,
so it can become inf or 0; the others hold a Python float. Where a peer raises (floor reached, too
many overflows) we return, with every attribute as the exception would have left it.
"""

import math

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def _float32(x: float) -> float:
    """`x` rounded half to even to float32, subnormals kept, inf past the largest."""
    if x == 0 or not math.isfinite(x):
        return x
    exponent = max(math.frexp(x)[1] - 24, -149)
    y = math.ldexp(round(math.ldexp(x, -exponent)), exponent)
    return math.copysign(math.inf, x) if abs(y) > FLOAT32_MAX else y


class _Peer:
    init_scale = 2.0**16
    growth_factor, backoff_factor = 2.0, 0.5
    growth_interval = 2000
    good = bad = 0  # counters, for the peers that count
    step, last_overflow = 0, -1  # for those that remember when
    held = staticmethod(float)

    def __init__(self, **settings) -> None:
        for name, value in settings.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no setting {name!r}")
            setattr(self, name, value)
        self.scale = float(self.init_scale)

    @property
    def up(self) -> float:
        return self.held(self.scale * self.growth_factor)

    @property
    def down(self) -> float:
        return self.held(self.scale * self.backoff_factor)


class _Single(_Peer):
    held = staticmethod(_float32)

    @property
    def up_if_finite(self) -> float:
        return self.up if math.isfinite(self.up) else self.scale


class Torch(_Single):
    """PyTorch 2.13.0, torch/amp/grad_scaler.py, GradScaler (kernel `_amp_update_scale_`, run)."""

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale = self.down
        elif self.good == self.growth_interval:
            self.scale = self.up_if_finite
            self.good = 0  # also when the growth was refused


class Verl(Torch):
    """verl 0.9.1, workers/engine/fsdp/transformer_impl.py: torch's ShardedGradScaler at 400."""

    growth_interval = 400


class Apex(_Peer):
    """NVIDIA/apex, apex/amp/scaler.py, LossScaler, as since it has a minimum (factors fixed)."""

    min_scale, max_scale = None, 2.0**24

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.scale = min(self.max_scale, self.scale)

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale = max(self.min_scale or 0.0, self.down)
        if self.good == self.growth_interval:
            self.scale = min(self.max_scale, self.up)
            self.good = 0


class ApexFP16(_Peer):
    """NVIDIA/apex at 2fa4dba, apex/fp16_utils/loss_scaler.py, DynamicLossScaler."""

    init_scale, growth_interval = 2.0**32, 1000
    min_scale = 1.0  # a literal in the original

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.down, self.min_scale)
            self.last_overflow = self.step
        elif (self.step - self.last_overflow) % self.growth_interval == 0:
            self.scale = self.up
        self.step += 1


class Keras3(Torch):
    """Keras 3.15.1, src/optimizers/loss_scale_optimizer.py, LossScaleOptimizer: no check at all."""

    init_scale = 2.0**15
    up_if_finite = _Single.up  # past 2^127 the scale is inf, for good


class MXNet(_Peer):
    """MXNet 1.9.1, contrib/amp/loss_scaler.py, LossScaler; called from gluon's Trainer._update."""

    max_scale = 2.0**24
    pending = None

    def update(self, overflow: bool) -> None:
        if self.pending is not None:
            self.scale = self.pending  # the verdict of the step before comes into force only now
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.pending = self.down
        if self.good == self.growth_interval:
            self.pending = min(self.max_scale, self.up)
            self.good = 0


class JMP(_Single):
    """jmp 0.0.4, _src/loss_scale.py, DynamicLossScale.adjust (float32; init is the user's)."""

    init_scale, min_scale = 2.0**15, 1.0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.min_scale, self.down)
        elif self.good == self.growth_interval - 1:
            self.scale = self.up_if_finite
        self.good = 0 if overflow else (self.good + 1) % self.growth_interval


class TFKeras(JMP):
    """tf_keras 2.21.0, mixed_precision/loss_scale_optimizer.py, _DynamicLossScaleState: as jmp."""


class MPX(JMP):
    """mixed_precision_for_JAX at d454efb, mpx/_loss_scaling.py, DynamicLossScaling.adjust."""

    max_scale = 65504.0  # a literal in the original

    def update(self, overflow: bool) -> None:
        super().update(overflow)
        # On every call: a start above 65504 is cut after the first step, whatever its outcome.
        self.scale = min(max(self.scale, self.min_scale), self.max_scale)


class Flax(_Single):
    """flax 0.12.8, training/dynamic_scale.py, DynamicScale: growth on the N+1-th clean step."""

    min_scale, max_scale = 2.0**-126, FLOAT32_MAX  # the maximum is a literal in the original

    def update(self, overflow: bool) -> None:
        grow = self.good == self.growth_interval
        if overflow:
            self.scale = max(self.down, self.min_scale or 0.0)
        elif grow:
            self.scale = min(self.up, self.max_scale)
        self.good = 0 if grow or overflow else self.good + 1


class DeepSpeed(_Peer):
    """DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py, DynamicLossScaler (defaults: the config's)."""

    growth_interval, min_scale, hysteresis = 1000, 1.0, 2
    consecutive_hysteresis, raise_at_min = False, True

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.bad < self.hysteresis - 1:
                self.bad += 1
            elif self.scale == self.min_scale and self.raise_at_min:
                return  # raises; neither the step nor the overflow is recorded
            else:
                self.scale = max(self.down, self.min_scale)
            self.last_overflow = self.step
        else:
            stable = self.step - self.last_overflow - 1
            grow = stable > 0 and stable % self.growth_interval == 0
            if self.consecutive_hysteresis or grow:
                self.bad = 0
            if grow:
                self.scale = self.up
        self.step += 1


class Megatron(_Single):
    """megatron-core 0.16.1, core/optimizer/grad_scaler.py, DynamicGradScaler."""

    init_scale, growth_interval, min_scale, hysteresis = 2.0**32, 1000, 1.0, 2
    max_scale = None

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good = 0
            self.bad += 1
            if self.bad >= self.hysteresis:
                self.scale = max(self.down, self.min_scale or 0.0)
            return
        self.good += 1
        if self.good == self.growth_interval:
            self.good = self.bad = 0
            self.scale = min(self.up, self.max_scale or math.inf)


class ColossalAI(Megatron):
    """ColossalAI 0.5.0, naive_amp/grad_scaler, DynamicGradScaler (bounds: its FP16 mixin's)."""

    init_scale, max_scale = 2.0**16, 2.0**32


class NeMo(Torch):
    """NeMo at 0076724, nlp/parts/nlp_overrides.py, GradScaler (its trainers: 2^32, 1000, 2)."""

    hysteresis = 1

    def update(self, overflow: bool) -> None:
        self.bad = self.bad + 1 if overflow else 0
        if overflow and self.bad < self.hysteresis:
            self.good = 0
        else:
            super().update(overflow)


class Fairseq(_Peer):
    """fairseq at 0d77035, optim/dynamic_loss_scaler.py, DynamicLossScaler (CLI defaults)."""

    init_scale, min_scale, tolerance, threshold = 2.0**7, 1e-4, 0.0, None
    growth_interval = 2**14  # over data-parallel size and update_freq; the class alone: 2000
    last_rescale = -1

    def update(self, overflow: bool) -> None:
        if overflow:
            before = self.scale
            since = self.step - self.last_rescale or 1000  # 0 only after the exception below
            self.last_overflow = self.step
            self.bad += 1
            if self.bad / since >= self.tolerance:
                self.scale = max(self.down, self.threshold or 0.0)
                self.last_rescale = self.step
                self.bad = 0
            if self.scale <= self.min_scale:
                self.scale = before
                return  # raises FloatingPointError; the step is not counted
        elif (self.step - self.last_overflow) % self.growth_interval == 0:
            self.scale = self.up
            self.last_rescale = self.step  # but the tally of overflows lives on
        self.step += 1


class Metaseq(_Peer):
    """metaseq at 0ba5657, optim/dynamic_loss_scaler.py: fairseq's, and the window moves."""

    init_scale, min_scale, tolerance, threshold = 4.0, 2.0**-5, 0.0, None
    growth_interval = 256  # only to begin with
    last_rescale = -1

    def update(self, overflow: bool) -> None:
        if overflow:
            before = self.scale
            self.last_overflow = self.step
            self.bad += 1
            if self.bad / (self.step - self.last_rescale) >= self.tolerance:
                self.scale = max(self.down, self.threshold or 0.0)
                self.growth_interval = max(int(self.growth_interval * self.backoff_factor), 1)
                self.last_rescale = self.step
                self.bad = 0
            if self.scale < self.min_scale:
                self.scale = before  # the window stays halved
        elif (self.step - self.last_overflow) % self.growth_interval == 0:
            self.scale = self.up
            self.growth_interval *= self.growth_factor
            self.last_rescale = self.step
        self.step += 1


class Paddle(_Single):
    """Paddle 3.3.1, amp/grad_scaler.py, GradScaler -> AmpScaler._update (dynamic graph)."""

    hysteresis = 1  # decr_every_n_nan_or_inf

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        self.bad = self.bad + 1 if overflow else 0
        if self.bad == self.hysteresis:
            self.scale = self.down
            self.bad = 0
        if self.good == self.growth_interval:
            self.scale = self.up
            self.good = 0


class MindSpore(_Peer):
    """MindSpore 2.10.0, train/loss_scale_manager.py, DynamicLossScaleManager."""

    init_scale = 2.0**24
    min_scale, max_bad = 1.0, 1000  # literals in the original
    step, last_overflow = 1, 0

    def update(self, overflow: bool) -> None:
        self.bad = self.bad + 1 if overflow else 0
        if overflow:
            self.scale = max(self.down, self.min_scale)
            self.last_overflow = self.step
        elif (self.step - self.last_overflow) % self.growth_interval == 0:
            self.scale = self.up
        if self.bad <= self.max_bad:  # else raises, and the step is not counted
            self.step += 1


class Modulus(_Single):
    """NVIDIA/modulus-sym at 21d3265, sym/amp.py, GradScaler (its own `_amp_update_scale_`)."""

    max_scale, recover_threshold, recover_growth_interval = 2.0**30, 2.0**6, 100

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        recovering = self.scale <= self.recover_threshold
        if overflow:
            self.scale = self.down
        elif self.good == (self.recover_growth_interval if recovering else self.growth_interval):
            self.scale = min(self.up, self.max_scale)
            self.good = 0


class OpenSeq2SeqBackoff(ApexFP16):
    """OpenSeq2Seq, optimizers/automatic_loss_scaler.py, BackoffScaler (2383d5d: 2^24, not 2^14)."""

    init_scale = max_scale = 2.0**14  # the original has no other start
    growth_interval = 2000

    def update(self, overflow: bool) -> None:
        # The original's graph does not order the step count against its readers; we count last.
        super().update(overflow)
        self.scale = min(self.scale, self.max_scale)
