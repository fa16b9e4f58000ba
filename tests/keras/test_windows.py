"""What belongs to which step: losses and gradients that never meet one, and clips of one's own."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from gradlift import Cause, read_journal
from gradlift.errors import MisuseError
from gradlift.keras import LossScaleOptimizer, ScaleLogger

SGD = keras.optimizers.SGD


def tensor(*values, dtype=np.float32):
    return ops.convert_to_tensor(np.array(values, dtype))


def started(size=1, **settings):
    held = [keras.Variable(np.zeros(1, np.float32), name=f"v{i}") for i in range(size)]
    optimizer = LossScaleOptimizer(SGD(1.0), **(settings or {"initial_scale": 1024}))
    optimizer.build(held)
    return optimizer, held


def scaled(optimizer, *true):
    scale = optimizer.scale_loss(tensor(1.0)[0])
    return [tensor(g) * scale for g in true]


def test_gradients_unscaled_only_to_be_looked_at():
    """Their step never came: the next one takes scaled gradients as ever."""
    optimizer, (w,) = started()
    optimizer.get_unscaled_gradients(scaled(optimizer, 1.0))
    optimizer.apply(scaled(optimizer, 1.0), [w])
    assert w.numpy().tolist() == [-1]
    assert optimizer.result.grad_norm == 1


def test_a_dead_loss_that_was_left_out_spoils_no_later_step():
    optimizer, (w,) = started()
    optimizer.scale_loss(tensor(np.nan)[0])  # if not finite: continue
    optimizer.apply(scaled(optimizer, 1.0), [w])
    assert optimizer.result.stepped
    optimizer.get_unscaled_gradients(scaled(optimizer, np.inf))
    optimizer.apply(scaled(optimizer, 1.0), [w])
    assert optimizer.result.stepped
    assert w.numpy().tolist() == [-2]


def test_a_dead_loss_among_others_is_blamed_where_gradients_show_it():
    optimizer, (w,) = started()
    optimizer.scale_loss(tensor(np.nan)[0])
    optimizer.apply(scaled(optimizer, np.nan), [w])
    assert optimizer.result.cause is Cause.LOSS_NONFINITE
    assert w.numpy().tolist() == [0]


def test_a_clip_of_ones_own_hides_nothing():
    """Scale, norm and culprit are of what came out of backward."""
    optimizer, held = started(3, rule="auto:init_scale=2^8")
    true = optimizer.get_unscaled_gradients(scaled(optimizer, 3.0, 4.0, 0.0))
    optimizer.apply([ops.clip(g, -0.5, 0.5) for g in true], held)
    assert optimizer.result.grad_norm == 5
    assert [v.numpy().tolist() for v in held] == [[-0.5], [-0.5], [0]]
    plain, others = started(3, rule="auto:init_scale=2^8")
    plain.apply(scaled(plain, 3.0, 4.0, 0.0), others)
    assert float(optimizer.loss_scale) == float(plain.loss_scale)
    true = optimizer.get_unscaled_gradients(scaled(optimizer, np.inf, 1.0, 1.0))
    norm = ops.sqrt(sum(ops.sum(g * g) for g in true))
    optimizer.apply([g / norm for g in true], held)  # now each is NaN, or zero
    assert optimizer.result.cause is Cause.OVERFLOW
    assert [c.described for c in optimizer.result.culprits] == ["v0 (inf)"]


def test_a_half_loss_and_a_full_one_carry_different_scales():
    optimizer, _ = started(initial_scale=2**17)
    optimizer.scale_loss(tensor(1.0, dtype=np.float16)[0])
    with pytest.raises(MisuseError, match="a float16 loss and a float32 one"):
        optimizer.scale_loss(tensor(1.0)[0])


def test_limits_are_enforced_once():
    """By the step itself where it runs in Python; then `ScaleLogger` has nothing to add."""
    optimizer, (w,) = started(rule="backoff:init_scale=8,min_scale=8", on_floor="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        optimizer.apply(scaled(optimizer, np.inf), [w])
        optimizer.enforce(optimizer.record)
    said = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(said) == 1
    assert "non-finite gradients at the smallest scale, 2^3" in said[0]


def test_a_checkpoint_of_keras_into_a_rule_with_another_memory(tmp_path):
    def model(optimizer):
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        made.compile(optimizer, "mse")
        return made

    x, y = np.ones((24, 2), np.float32), np.ones((24, 1), np.float32)
    peer = model(keras.optimizers.LossScaleOptimizer(SGD(0.01)))
    peer.fit(x, y, batch_size=1, verbose=0)
    peer.save_weights(tmp_path / "own.weights.h5")
    ours = model(LossScaleOptimizer(SGD(0.01), rule="auto"))
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "own.weights.h5")
    state = ours.optimizer.record.state
    assert (state.scale, state.clean, state.seen) == (2.0**15, 0, 0)


def test_a_journal_shows_the_headroom_whatever_the_rule(tmp_path):
    """And records nothing else: weights are the same bits without it."""

    def trained(**logger):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(LossScaleOptimizer(SGD(0.01), rule="static:8"), "mse")
        x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[ScaleLogger(**logger)])
        return [w.tobytes() for w in model.get_weights()]

    path = tmp_path / "run.jsonl"
    assert trained(journal=path) == trained()
    steps = read_journal(path).steps
    assert len(steps) == 4
    assert all(0 < s.amax < np.inf for s in steps)
