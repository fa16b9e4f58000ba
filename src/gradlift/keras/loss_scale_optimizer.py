"""`LossScaleOptimizer`: Keras' own, with gradlift's rules, bounds, causes and record."""

from __future__ import annotations

import dataclasses
import importlib
import math
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from ..core import NO_LIMITS, Cause, Limits, StepResult, carried
from ..core import state as saved_state
from ..errors import MisuseError, SettingsError, SettingsTypeError, warn
from ..rules import Off, Rule, parse
from ..rules.base import setting_text
from .arguments import keras_rule, rule_of
from .pairing import Pairing
from .saving import checked, rule_bytes
from .step_record import HISTORY, ROWS, Conclusions, Record, StepRow, Values, memory_of

_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The inner optimizers that have a LossScaleOptimizer around them."""


def _backend() -> Any:
    """Our module for the backend that Keras runs on."""
    name = keras.backend.backend()
    if name not in ("tensorflow", "jax", "torch"):
        raise SettingsError(
            f"Keras runs on the backend {name!r}; gradlift.keras knows tensorflow, jax and torch"
        )
    try:
        return importlib.import_module(f"gradlift.keras.backends.{name}")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"gradlift.keras on the {name} backend needs {error.name}: "
            f"pip install 'gradlift[keras,{name}]'"
        ) from error


@keras.saving.register_keras_serializable("gradlift")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """An optimizer around an optimizer: scales the loss, checks and unscales gradients, and skips
    a step that would do harm.

    | setting | meaning |
    |---|---|
    | `rule` | any rule of `gradlift.rules`, or its text; "auto" is "auto:cautious", since `fit` \
never computes a batch again |
    | `initial_scale`, `dynamic_growth_steps` | Keras' own two, for Keras' own rule: give these or \
`rule` |
    | `max_consecutive_skips`, `on_floor` | when to stop a run that only skips; `ScaleLogger` does \
it for `fit` |
    | `drop` | what a bad "micro-batch" costs where the inner optimizer accumulates: itself, or \
the "window" so far |

    >>> import keras, numpy as np
    >>> from gradlift.keras import LossScaleOptimizer
    >>> weight = keras.Variable(np.ones(2, "float32"))
    >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), rule="static:8")
    >>> optimizer.build([weight])
    >>> float(optimizer.scale_loss(np.float32(0.25)))
    2.0
    >>> optimizer.apply([keras.ops.convert_to_tensor(np.float32([8, 16]))], [weight])
    >>> weight.numpy().tolist(), str(optimizer.result.verdict)
    ([0.5, 0.0], 'apply')
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        rule: Rule | str | float | None = None,
        max_consecutive_skips: int | None = None,
        on_floor: str = "hold",
        drop: str = "micro-batch",
        dynamic: bool = True,
        **kwargs: Any,
    ) -> None:
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise SettingsTypeError(
                "this optimizer is a LossScaleOptimizer already, so the loss would be scaled "
                "twice: pass it on as it is; of Keras' own class, wrap its inner_optimizer"
            )
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise SettingsTypeError(
                f"inner_optimizer is {inner_optimizer!r}, expected a keras.optimizers.Optimizer"
            )
        if drop not in ("micro-batch", "window"):
            raise SettingsError(f"drop is {drop!r}, expected 'micro-batch' or 'window'")
        if inner_optimizer.loss_scale_factor is not None:
            factor = inner_optimizer.loss_scale_factor
            text = f"static:{setting_text(float(factor))}"
            warn(
                f"the inner optimizer's loss_scale_factor={factor!r} is taken out, since this one "
                f"scales the loss; for that very scale give rule='{text}'"
            )
        chosen = rule_of(rule, initial_scale, dynamic_growth_steps, dynamic)
        if inner_optimizer in _WRAPPED:
            raise SettingsError(
                "another LossScaleOptimizer wraps this inner optimizer already, and each would "
                "have a scale of its own: go on with that one, or wrap a new optimizer, such as "
                "type(inner).from_config(inner.get_config())"
            )
        moves = chosen.min_scale < chosen.max_scale
        interval = getattr(chosen, "growth_interval", None) if moves else None
        super().__init__(inner_optimizer, chosen.init().scale, interval, name, **kwargs)
        self.rule = chosen
        self.limits = Limits(max_consecutive_skips, on_floor)
        self.drop = drop
        self._sharp = rule is None or parse(rule) == chosen
        """False: "auto" stands for its cautious form."""
        self._backend = _backend()
        self._window = self._backend.new_window()
        self._loss_is_half = False
        self._scaled_once = False
        self._pairing = Pairing()
        self._conclusions = Conclusions()
        self._recorded = False
        """Is a journal kept? Then amax is taken even if the rule needs none."""
        _WRAPPED.add(inner_optimizer)

    # Variables

    def build(self, var_list: Any) -> None:
        """Creates the variables: Keras' own, the inner optimizer's, and two more."""
        super().build(var_list)
        start = self.rule.init()
        counts = [0] * (HISTORY - len(memory_of(start)))
        self.history = self.add_variable(
            shape=(HISTORY,),
            dtype="int32",
            initializer=_Given(np.array([*memory_of(start), *counts], np.int32)),
            name="history",
        )
        self.ring = self.add_variable(
            shape=(ROWS, len(StepRow._fields)), dtype="float32", initializer="zeros", name="ring"
        )

    @property
    def _kept(self) -> Values:
        """The variables that hold the state and the record."""
        return Values(self.dynamic_scale, self.step_counter, self.history, self.ring)

    @property
    def _wants_amax(self) -> bool:
        return self.rule.magnitudes or self._recorded

    def _place(self, variable: Any) -> int:
        return next(i for i, v in enumerate(self._variables) if v is variable)

    def _position(self, variable: Any) -> int:
        """A trainable variable's place."""
        return int(self._trainable_variables_indices[self._var_key(variable)])

    # The path of one step

    def scale_loss(self, loss: Any) -> Any:
        """loss * scale, in float32; notes whether the loss itself was finite."""
        if isinstance(self.rule, Off):
            return loss
        loss = ops.convert_to_tensor(float(loss) if isinstance(loss, int) else loss)
        kind = keras.backend.standardize_dtype(loss.dtype)
        if "float" not in kind:
            raise MisuseError(f"the loss is {kind}, expected a real floating-point number")
        self._pairing.add_loss(kind)
        self._loss_is_half = kind == "float16"
        self._scaled_once = True
        self._window.note(loss)
        scale = self.dynamic_scale if self.built else self.initial_scale
        wide = "float64" if kind == "float64" else "float32"
        return ops.cast(loss, wide) * ops.cast(self._carried(scale), wide)

    def _carried(self, scale: Any) -> Any:
        """The scale that the loss can carry."""
        return carried(scale, self._loss_is_half, None if isinstance(scale, float) else ops)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Applies scaled gradients if they are sound; moves the scale either way."""
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if not self.built:
            if variables is None:
                raise MisuseError(
                    "apply() got gradients without variables before the optimizer was built: call "
                    "build(model.trainable_variables) first"
                )
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        variables = self._checked(grads, variables)
        if isinstance(self.rule, Off):
            if grads:
                self.inner_optimizer.apply(grads, variables)
            return
        self._backend.apply(self, grads, variables)
        self._pairing = Pairing()
        if self.limits != NO_LIMITS and self._backend.readable(self.dynamic_scale.value):
            self.enforce()

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """The same as values in, values out: (new weights, new optimizer variables)."""
        if keras.backend.backend() != "jax" or isinstance(self.rule, Off):
            plain = super(keras.optimizers.LossScaleOptimizer, self).stateless_apply
            return plain(optimizer_variables, grads, trainable_variables)
        if not self.built:
            raise MisuseError("stateless_apply() before build(model.trainable_variables)")
        grads = list(grads)
        self._checked(grads, None)
        self._pairing = Pairing()
        held, weights = (
            [v.value if isinstance(v, keras.Variable) else v for v in group]
            for group in (optimizer_variables, trainable_variables)
        )
        return self._backend.stateless(self, held, grads, weights)

    def _checked(self, grads: list[Any], variables: list[Any] | None) -> list[Any]:
        """The variables that go with these gradients, or what is wrong with them."""
        if variables is None:
            variables = list(self._trainable_variables)
        if grads and len(grads) != len(variables):
            raise MisuseError(
                f"{len(grads)} gradients for {len(variables)} variables: pass one for each "
                "variable, None where there is none"
            )
        self._check_variables_are_known(variables)
        for g, v in zip(grads, variables):
            if g is not None and "float" not in (kind := keras.backend.standardize_dtype(g.dtype)):
                raise MisuseError(
                    f"the gradient of {getattr(v, 'path', 'a variable')} is {kind}, expected real "
                    "floating-point numbers"
                )
        self._pairing.check_true(grads)
        if not self._scaled_once and self.initial_scale != 1 and self._indexed(grads, variables)[0]:
            self._scaled_once = True
            warn(
                "gradients came before any loss went through scale_loss(): they are divided by "
                f"the scale all the same ({self.initial_scale:g} at the start). Differentiate "
                "optimizer.scale_loss(loss), or give rule='off'"
            )
        return variables

    def _indexed(
        self, grads: list[Any], variables: list[Any]
    ) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """The gradients there are, each with its variable's place; and apart from them the new
        values of variables that a step overwrites (float8's histories), which carry no scale."""
        scaled: list[tuple[int, Any]] = []
        overwriting: list[tuple[int, Any]] = []
        for i, (g, v) in enumerate(zip(grads, variables)):
            if g is not None:
                group = overwriting if self._overwrite_variable_with_gradient(v) else scaled
                group.append((i if v is None else self._position(v), g))
        return scaled, overwriting

    def _mapped(
        self, function: Callable[[Any], Any], grads: list[Any], variables: list[Any]
    ) -> list[Any]:
        """Gradients with `function` applied; what only looks like one (float8) is left alone."""
        return [
            g if g is None or self._overwrite_variable_with_gradient(v) else function(g)
            for g, v in zip(grads, variables)
        ]

    def _window_start(self, inner: list[Any]) -> list[tuple[int, Any]]:
        """The inner optimizer's accumulators and counter as they were when its window began."""
        places = {id(v): i for i, v in enumerate(self.inner_optimizer.variables)}
        fresh = []
        for optimizer in getattr(self.inner_optimizer, "optimizers", [self.inner_optimizer]):
            steps = optimizer.gradient_accumulation_steps
            if steps and optimizer.built:
                count = places[id(optimizer._iterations)]
                fresh.append((count, inner[count] - inner[count] % steps))
                sums = [v for v in optimizer._accumulated_gradients if v is not None]
                fresh += [(i, ops.zeros_like(inner[i])) for i in (places[id(v)] for v in sums)]
        return fresh

    def _forget_window(self) -> None:
        held = self.inner_optimizer.variables
        for i, value in self._window_start([ops.convert_to_tensor(v) for v in held]):
            held[i].assign(value)

    # tf.keras' names

    def get_scaled_loss(self, loss: Any) -> Any:
        """tf.keras' name for `scale_loss`. Of a function that returns a loss: the function that
        returns the scaled one."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Any) -> list[Any]:
        """The true gradients, to be clipped or looked at; the next `apply` takes such ones."""
        grads = list(grads)
        self._pairing.check_scaled(grads)
        if isinstance(self.rule, Off):
            return grads
        if self.built:
            variables, scale = self._checked(grads, None), self.dynamic_scale.value
        else:  # tf.keras' loops build at their first step
            variables, scale = [None] * len(grads), self.initial_scale
        used = self._carried(self._backend.number(scale))
        marked, overwriting = self._indexed(grads, variables)
        if marked or overwriting:
            seen = self._backend.inspect(marked, overwriting, used, used, self._wants_amax)
            self._window.unscaled(seen)
        true = self._mapped(lambda g: self._backend.unscaled(g, 1 / used), grads, variables)
        self._pairing.add_unscaled(grads, true)
        return true

    @property
    def loss_scale(self) -> Any:
        """tf.keras' name for the scale of the next step."""
        scale = self.dynamic_scale if self.built else self.initial_scale
        return ops.convert_to_tensor(scale, "float32")

    def get_scale(self) -> float:
        """The scale of the next step as a number. Reads the device.

        >>> import keras
        >>> from gradlift.keras import LossScaleOptimizer
        >>> LossScaleOptimizer(keras.optimizers.SGD(0.1), rule="static:8").get_scale()
        8.0
        """
        return float(ops.convert_to_numpy(self.loss_scale))

    @property
    def dynamic(self) -> bool:
        """Does the scale move?"""
        return bool(self.rule.min_scale < self.rule.max_scale)

    @property
    def dynamic_counter(self) -> Any:
        """tf.keras' name for `step_counter`; None if the scale is fixed."""
        if not self.dynamic:
            return None
        return self.step_counter if self.built else 0

    # What happened

    @property
    def record(self) -> Record:
        """State, counts and the last steps, read off the variables now."""
        if not self.built:
            return Record.fresh(self.rule.init())
        return Record(Values(*(ops.convert_to_numpy(v.value) for v in self._kept)))

    @property
    def result(self) -> StepResult | None:
        """What the last step came to; None before the first. Reads the device.

        >>> import keras
        >>> from gradlift.keras import LossScaleOptimizer
        >>> LossScaleOptimizer(keras.optimizers.SGD(0.1)).result is None
        True
        """
        return self.record.result(self.names, self.limits)

    @property
    def counts(self) -> dict[Cause, int]:
        """How many steps ended for which cause; NONE counts those that were applied."""
        return self.record.counts

    @property
    def skipped_steps(self) -> int:
        """Steps that had something to apply and were not applied."""
        return self.record.skipped

    @property
    def names(self) -> list[str]:
        """The trainable variables' paths."""
        held = self._trainable_variables if self.built else []
        return [getattr(v, "path", None) or str(v.name) for v in held]

    def enforce(self, record: Record | None = None) -> None:
        """Concludes the steps since the last call: `ScaleLogger`'s journal gets them, a step at
        the floor warns if `on_floor` says so, and one that broke a limit raises `TrainingHalted`.

        `ScaleLogger` calls it in `fit`, and `apply` where it runs in Python. Call it in a compiled
        loop of your own, at least every 64 steps.

        >>> import keras
        >>> from gradlift.keras import LossScaleOptimizer
        >>> LossScaleOptimizer(keras.optimizers.SGD(0.1), max_consecutive_skips=9).enforce()
        """
        names, lr = self.names, math.nan
        channels = self._conclusions.channels
        if channels:
            lr = self._learning_rate_now()
            sizes = [math.prod(v.shape) for v in self._trainable_variables] if self.built else []
            for channel in channels:
                if not channel.described:
                    channel.describe(parameters=dict(zip(names, sizes)))
        self._conclusions.take(record or self.record, self.rule, self.limits, names, lr)

    def _learning_rate_now(self) -> float:
        try:
            return float(ops.convert_to_numpy(self.learning_rate))
        except AttributeError:  # a MultiOptimizer has several
            return math.nan

    # Saving

    def get_config(self) -> dict[str, Any]:
        """Keras' own four settings, and what they leave open: another rule as its text, limits,
        `drop`."""
        held = super().get_config()
        config = {
            key: held[key]
            for key in ("name", "inner_optimizer", "initial_scale", "dynamic_growth_steps")
        }
        interval = config["dynamic_growth_steps"]
        if interval is None or self.rule != keras_rule(config["initial_scale"], interval):
            config["rule"] = str(self.rule)
        if self.limits != NO_LIMITS:
            config |= dataclasses.asdict(self.limits)
        if self.drop != "micro-batch":
            config["drop"] = self.drop
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """An equal optimizer; a rule that is named goes before Keras' two settings."""
        two = ("initial_scale", "dynamic_growth_steps") if "rule" in config else ()
        held = {key: value for key, value in config.items() if key not in two}
        return super().from_config(held, custom_objects)

    def save_own_variables(self, store: Any) -> None:
        """The variables by number, as Keras does, and the rule they belong to. A journal gets the
        steps that are saved first, for a run that is resumed from here does not make them again."""
        if self._conclusions.channels:
            self.enforce()
        super().save_own_variables(store)
        store["rule"] = rule_bytes(self.rule)

    def load_own_variables(self, store: Any) -> None:
        """Takes what this class or Keras' own saved, if it is sound; else nothing changes."""
        if self.built:
            kept = [self._place(v) for v in self._kept]
            found = checked(store, self.rule, [tuple(v.shape) for v in self.variables], kept)
            if found is not None:
                for place, value in found.items():
                    self.variables[place].assign(value)
                self._conclusions.begin(self.record.steps)
                return
        names = [name for name in store.keys() if name != "rule"]  # noqa: SIM118  (no mapping)
        super().load_own_variables({name: store[name] for name in names})  # the error says why

    def state_dict(self) -> dict[str, Any]:
        """The scale's state, JSON-able, in the layout that all adapters share; the inner
        optimizer's is not part of it.

        >>> import keras
        >>> from gradlift.keras import LossScaleOptimizer
        >>> LossScaleOptimizer(keras.optimizers.SGD(0.1), rule="static:8").state_dict()["scale"]
        8.0
        """
        record = self.record
        return saved_state.save(
            self.rule,
            record.state,
            steps=record.steps,
            skipped=record.skipped,
            sharp=self._sharp,
        )

    def load_state_dict(self, data: Any) -> None:
        """Resumes from `state_dict()` of any adapter, or of torch's scaler; refuses what is damaged
        and then changes nothing.

        A state counts skipped steps and not their causes: in `counts` they are UNKNOWN_NONFINITE.
        """
        if not self.built:
            raise MisuseError("load_state_dict() before build(model.trainable_variables)")
        loaded = saved_state.load(self.rule, data)
        counts = dict.fromkeys(Cause, 0)
        counts[Cause.NONE] = max(loaded.steps - loaded.skipped, 0)
        counts[Cause.UNKNOWN_NONFINITE] = loaded.skipped
        history = np.array([*memory_of(loaded.state), *counts.values()], np.int32)
        ring = np.zeros(tuple(self.ring.shape), np.float32)
        values = Values(loaded.state.scale, loaded.state.clean, history, ring)
        for variable, value in zip(self._kept, values):
            variable.assign(value)
        self._window.clear()
        self._pairing = Pairing()
        self._conclusions.begin(self.record.steps)


class _Given(keras.initializers.Initializer):  # type: ignore[misc]
    """A variable's first value, as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return ops.convert_to_tensor(self.value, dtype)
