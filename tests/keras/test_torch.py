"""PyTorch's own way: `backward()`, and gradients where torch leaves them."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("these are PyTorch's", allow_module_level=True)

import torch
from helpers.keras import line

from gradlift import Cause
from gradlift.keras import LossScaleOptimizer

SGD = keras.optimizers.SGD


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loop_with_backward(by_hand):
    """As Keras' guide for PyTorch writes it; the loss is seen."""
    optimizer = LossScaleOptimizer(SGD(1.0), rule="dynamic:init_scale=2^8,growth_interval=3")
    model = line(optimizer, inputs=2)
    optimizer.build(model.trainable_variables)
    seen = []
    for x in (0.5, 4096, 0.5, np.nan, 0.25, 0.25):
        model.zero_grad()
        loss = model(torch.tensor([[x, 1.0]])).float().mean()
        optimizer.scale_loss(loss).backward()
        grads = [v.value.grad for v in model.trainable_variables]
        if by_hand:
            grads = [g.clamp(-2, 2) for g in optimizer.get_unscaled_gradients(grads)]
        optimizer.apply(grads, model.trainable_variables)
        seen.append((optimizer.result.cause, float(optimizer.loss_scale)))
    assert seen == [
        (Cause.NONE, 256),
        (Cause.OVERFLOW, 128),
        (Cause.NONE, 128),
        (Cause.LOSS_NONFINITE, 128),
        (Cause.NONE, 128),
        (Cause.NONE, 256),
    ]
    assert model.get_weights()[0].ravel().tolist() == [-1.5, -4]


def test_gradients_are_not_written_to():
    w = keras.Variable(np.zeros(2, np.float32))
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([w])
    optimizer.scale_loss(torch.tensor(1.0))
    grad = torch.tensor([8.0, 16.0])
    optimizer.apply([grad], [w])
    assert grad.tolist() == [8, 16]
    assert w.numpy().tolist() == [-1, -2]
    assert not w.value.grad_fn
    assert w.value.requires_grad


def test_a_graph_is_not_kept_alive():
    """What is noted of a loss holds no graph, and so no activations."""
    w = keras.Variable(np.zeros(2, np.float32))
    optimizer = LossScaleOptimizer(SGD(1.0), rule="static:8")
    optimizer.build([w])
    optimizer.scale_loss((w.value * 2).sum())
    assert [loss.grad_fn for loss in optimizer._window.losses] == [None]
