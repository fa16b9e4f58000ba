"""A DeepSpeed run on the CPU in float16 whose backward pass turns NaN; its console is its log.

python deepspeed_job.py STAGE STEPS BAD LEVEL    NaN gradients from step BAD on; INFO or WARNING
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(RANK="0", LOCAL_RANK="0", LOCAL_SIZE="1", WORLD_SIZE="1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger


class Spoiled(torch.autograd.Function):
    """Its gradient is NaN while `on`."""

    on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan") if Spoiled.on else grad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        return self.last(Spoiled.apply(torch.tanh(self.first(x)))).float().square().mean()


def main(stage, steps, bad, level):
    type(get_accelerator()).is_fp16_supported = lambda self: True
    torch.manual_seed(0)
    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 5,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "csv_monitor": {"enabled": True, "output_path": ".", "job_name": "tables"},
            "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1},
        },
    )
    for each in (logger, *logger.handlers) if level == "INFO" else ():
        each.setLevel(level)
    for step in range(1, steps + 1):
        Spoiled.on = step >= bad
        loss = engine(torch.randn(4, 8).half())
        engine.backward(loss)
        engine.step()


main(*map(int, sys.argv[1:4]), sys.argv[4])
