"""PyTorch: `GradScaler`, a drop-in for `torch.amp.GradScaler` that says what happened.

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

from .lifting.lifting import layerwise
from .masters.half_model import half_model
from .masters.master_weights import MasterWeights
from .probing import probe
from .scaler.grad_scaler import GradScaler
from .static_scale import find_scale

__all__ = ["GradScaler", "MasterWeights", "find_scale", "half_model", "layerwise", "probe"]
