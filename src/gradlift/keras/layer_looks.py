"""What `ScaleLogger` records on request: weights and their update, outputs of layers."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import keras
import numpy as np


class LayerLooks:
    """Looks at the weights and layers of a model, between two batches.

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="d")])
    >>> looks = LayerLooks(model, np.ones((4, 2), "float32"))
    >>> sorted(looks.forward()), looks.forward()["d"]["elements"]
    (['d'], 12)
    >>> before = looks.weights()
    >>> facts = looks.updates(before, looks.weights())
    >>> [(path.rpartition("/")[2], fact["update"]) for path, fact in sorted(facts.items())]
    [('bias', 0.0), ('kernel', 0.0)]
    """

    def __init__(self, model: Any, inputs: Any = None) -> None:
        self.model, self.inputs = model, inputs
        self._inside: Any = None

    def values(self) -> keras.StatelessScope:
        """Where the model's variables have their values: in JAX's `fit` these live outside."""
        model = self.model
        outside = {} if getattr(model, "_jax_state_synced", True) else model._jax_state or {}
        pairs: list[tuple[Any, Any]] = []
        for name in ("trainable_variables", "non_trainable_variables") if outside else ():
            pairs += zip(getattr(model, name), outside[name])
        return keras.StatelessScope(state_mapping=pairs)

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """A copy of each trained variable, as float32."""
        with self.values():
            return {v.path: _array(v.value) for v in self.model.trainable_variables}

    def updates(
        self, before: dict[str, np.ndarray[Any, Any]], after: dict[str, np.ndarray[Any, Any]]
    ) -> dict[str, dict[str, Any]]:
        """What a step did to each variable, in the fields that a torch run records."""
        dtypes = {v.path: v.dtype for v in self.model.trainable_variables}
        facts = {}
        for path, old in before.items():
            if not old.size or path not in after:
                continue
            entry = {"dtype": dtypes[path], "rms": _rms(old), "amax": float(np.abs(old).max())}
            entry["update"] = _rms(after[path] - old)
            if bad := int(old.size - np.isfinite(old).sum()):
                entry["nonfinite"] = bad
            if old.ndim > 1 and len(old) > 1 and bool((old == old[:1]).all()):
                entry["alike"] = 1
            facts[path] = entry
        return facts

    @property
    def has_graph(self) -> bool:
        """Are the outputs of its layers known? Not in a model whose `call` is Python code."""
        return isinstance(self.model, (keras.Sequential, keras.src.models.Functional))

    def forward(self) -> dict[str, dict[str, Any]]:
        """What each layer gives for the inputs, without dropout."""
        if self._inside is None:
            layers = [x for x in self.model.layers if not isinstance(x, keras.layers.InputLayer)]
            given = self.model.inputs
            given = given[0] if len(given) == 1 else given
            self._inside = layers, keras.Model(given, [x.output for x in layers])
        layers, inside = self._inside
        with self.values(), _no_gradients():
            outputs = inside(self.inputs, training=False)
        facts = {}
        for layer, output in zip(layers, outputs if len(layers) > 1 else [outputs]):
            for t in keras.tree.flatten(output)[:1]:
                dtype, x = keras.backend.standardize_dtype(t.dtype), _array(t)
                if not x.size or "float" not in dtype:
                    continue
                entry = {"type": type(layer).__name__, "dtype": dtype, "elements": int(x.size)}
                entry |= {"amax": float(np.abs(x).max()), "zero": float((x == 0).mean())}
                if bad := int(x.size - np.isfinite(x).sum()):
                    entry["nonfinite"] = bad
                facts[layer.name] = entry
        return facts


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(value, "float32")))


def _rms(x: np.ndarray[Any, Any]) -> float:
    return math.sqrt(float(np.mean(np.square(x, dtype=np.float64))))


def _no_gradients() -> contextlib.AbstractContextManager[Any]:
    """PyTorch's backend would keep a graph."""
    torch = sys.modules.get("torch") if keras.backend.backend() == "torch" else None
    return torch.no_grad() if torch is not None else contextlib.nullcontext()
