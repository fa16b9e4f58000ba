"""All faults, by the suite whose tests must find them."""

from __future__ import annotations

from .faults_core import CORE
from .faults_jax import JAX, KERAS_JAX, KERAS_TENSORFLOW, KERAS_TORCH
from .faults_rest import MXNET, OBSERVE
from .faults_torch import NUMPY, TORCH
from .mutant import Mutant

MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "torch": TORCH,
    "observe": OBSERVE,
    "keras-tensorflow": KERAS_TENSORFLOW,
    "jax": JAX,
    "keras-jax": KERAS_JAX,
    "core": CORE,
    "keras-torch": KERAS_TORCH,
    "mxnet": MXNET,
    "numpy": NUMPY,
}
