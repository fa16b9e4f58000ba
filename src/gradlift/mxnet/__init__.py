"""Gluon, MXNet 1.9.1: the three names of `mxnet.contrib.amp`, with the core's rules behind them.

>>> import mxnet as mx
>>> from mxnet import autograd, gluon
>>> from gradlift.mxnet import init_trainer, scale_loss
>>> net = gluon.nn.Dense(1, in_units=2)
>>> net.initialize(mx.init.One())
>>> trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
>>> scaler = init_trainer(trainer, "dynamic")
>>> for x in (1e38, 1.0):                       # times 2^16 the first leaves float32
...     with autograd.record():
...         loss = net(mx.nd.full((4, 2), x)).mean(axis=1)
...         with scale_loss(loss, trainer) as scaled:
...             autograd.backward(scaled)
...     trainer.step(batch_size=4)
...     print(scaler.result)                    # doctest: +ELLIPSIS
skip (overflow) at scale 2^16, first non-finite: dense..._weight (inf)
apply at scale 2^15, norm 1.732
"""

try:
    import mxnet as _mxnet  # noqa: F401
except AttributeError as error:  # it asks NumPy for names that NumPy has dropped
    raise ImportError(
        f"mxnet cannot be imported ({error}): MXNet 1.9.1 needs NumPy below 1.24, which needs "
        "Python 3.11 or older: pip install 'gradlift[mxnet]' in an environment of its own"
    ) from error

from .amp import init_loss_scaling, init_trainer, scale_loss, unscale
from .loss_scaler import DynamicLossScaler
from .loss_scaler import GluonLossScaler as LossScaler

__all__ = [
    "init_trainer",
    "scale_loss",
    "unscale",
    "init_loss_scaling",
    "LossScaler",
    "DynamicLossScaler",
]
