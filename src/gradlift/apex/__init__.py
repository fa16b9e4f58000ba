"""NVIDIA apex's `amp` and `fp16_utils`, for scripts that still call them; apex has dropped amp.

Change one import, `from apex import amp`, or none: `gradlift run --apex script.py`. Casting is
torch's autocast, scaling `GradScaler`, float32 masters `MasterWeights`.

>>> import torch
>>> from gradlift.apex import amp
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
>>> with amp.scale_loss(model(torch.ones(1, 2)).mean() / 4, optimizer) as scaled_loss:
...     scaled_loss.backward()
>>> optimizer.step()
>>> model.weight.dtype, amp.state_dict()["loss_scaler0"]
(torch.float16, {'loss_scale': 65536.0, 'unskipped': 1})
"""

from . import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]
