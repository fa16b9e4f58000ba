"""One of two workers of a dist_sync kvstore: prints what became of each step, as JSON.

The second one has a non-finite loss at step 1, an overflow at step 2, and one at step 3 that
clipping by value hides.
"""

import json
import sys

from helpers.mxnet import backward, finite, parameters, sgd, weights
from mxnet import nd

import gradlift.mxnet as gl

second = sys.argv[1] == "1"
trainer = sgd(parameters(), kvstore="dist_sync")
scaler = gl.init_trainer(trainer, "dynamic")
told = []
for step in range(5):
    value = float("nan") if second and step == 1 else 0.5
    backward(trainer, value, float("inf") if second and step in (2, 3) else 1.0)
    if step == 3:
        trainer.allreduce_grads()
        gl.unscale(trainer)
        for p in trainer._params:
            p.grad()[:] = nd.clip(p.grad(), -1, 1)
        trainer.update(2)
    else:
        trainer.step(2)
    told.append([scaler.result.cause.name, scaler.get_scale()])
print(json.dumps({"told": told, "finite": finite(weights(trainer))}))
