"""PyTorch: `GradScaler`, a drop-in for `torch.amp.GradScaler` that tells what happened.

`MasterWeights` steps 16-bit weights in float32; `half_model` makes a model of such weights. `probe`
looks at the gradients between modules, `layerwise` lifts each block by what it needs, `find_scale`
finds a static scale on a few batches.

>>> import torch
>>> from gradlift.torch import GradScaler
>>> model = torch.nn.Linear(4, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> scaler = GradScaler("cpu", rule="auto")
>>> result = scaler.train_step(lambda: model(torch.ones(2, 4)).mean(), optimizer, max_norm=1.0)
>>> result.stepped
True
"""

from ._find_scale import find_scale
from ._half import half_model
from ._layerwise import layerwise
from ._masters import MasterWeights
from ._probe import probe
from ._scaler import GradScaler

__all__ = ["GradScaler", "MasterWeights", "find_scale", "half_model", "layerwise", "probe"]
