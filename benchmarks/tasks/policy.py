"""The policy gradients of examples/torch_rl_fp16.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import Task

import torch_rl_fp16 as rl  # isort: skip  # found by `tasks`


class Policy(Task):
    name = "policy"
    title = "policy gradients"
    score_is = "1 - held-out reward"
    steps = 400
    max_norm = rl.MAX_NORM
    blocks = ["blocks.layers.*", "head"]  # noqa: RUF012

    def model(self) -> nn.Module:
        return rl.make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return rl.make_optimizer(model)

    def batch(self, model: nn.Module, step: int) -> Any:
        if step % rl.UPDATES == 0:
            self.rollout = rl.make_batch(model)
        return self.rollout

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return rl.policy_loss(model, batch)

    def score(self, model: nn.Module) -> float:
        return 1 - rl.heldout_reward(model)
