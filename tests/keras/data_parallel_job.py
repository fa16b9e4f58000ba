"""Two devices, run as a process of its own: Keras' DataParallel takes one decision for both.

A batch is split between them; what overflows on the second device alone skips the step on both.
"""

import json

import jax
import keras
import numpy as np
from helpers.keras import HUGE, NAN, bits, lifted, line, weights

from gradlift import Cause, read_journal
from gradlift.keras import ScaleLogger

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
DEVICES = keras.distribution.list_devices()
ROWS = [0.5, 0.25, 0.5, HUGE, HUGE, 0.5, NAN, 0.5, 0.25, 0.25]


def trained(inner, *rows, callbacks=(), **how):
    """Batches of two rows, one a device; the loss is their mean."""
    model = line(lifted(inner), **how)
    x = np.float32(rows)[:, None]
    settings = {"batch_size": 2, "shuffle": False, "verbose": 0}
    told = model.fit(x, 0 * x, callbacks=list(callbacks), **settings)
    return model, told.history


def each(value):
    """What each device holds."""
    return [np.asarray(shard.data).tobytes() for shard in value.addressable_shards]


def one_decision_for_both():
    for together in (1, 3):
        model, _ = trained(SGD(2.0), *ROWS, steps_per_execution=together)
        optimizer = model.optimizer
        assert weights(model) == [-0.75 - 0.5], weights(model)
        assert optimizer.counts[Cause.NONE] == 2
        assert optimizer.counts[Cause.UNKNOWN_NONFINITE] == 3
        assert float(optimizer.dynamic_scale.value) == 32
        for variable in [*model.variables, *optimizer.variables]:
            first, second = each(variable.value)
            assert first == second, variable.path


def the_same_as_on_one_device():
    split, told = trained(Adam(0.5), *ROWS, callbacks=[ScaleLogger("split.jsonl", every=2)])
    keras.distribution.set_distribution(None)
    alone, wanted = trained(Adam(0.5), *ROWS, callbacks=[ScaleLogger("alone.jsonl", every=2)])
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=DEVICES))
    # Compared as text, or to the bit: there is NaN in them.
    held = [[*m.variables, *m.optimizer.variables] for m in (split, alone)]
    assert bits(held[0]) == bits(held[1])
    assert str(told) == str(wanted)
    assert told["skipped"] == [3]
    lines = [
        [s._replace(seconds=0.0) for s in read_journal(f"{n}.jsonl").steps]
        for n in ("split", "alone")
    ]
    assert len(lines[0]) == 5
    assert str(lines[0]) == str(lines[1])


STORIES = [one_decision_for_both, the_same_as_on_one_device]

if __name__ == "__main__":
    assert len(DEVICES) == len(jax.devices()) == 2
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=DEVICES))
    for story in STORIES:
        story()
        print(json.dumps(story.__name__), flush=True)
