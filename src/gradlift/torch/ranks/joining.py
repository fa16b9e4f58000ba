"""Uneven inputs: a rank that has no batch left stands in for its part of the collectives.

    rank 0   pass  gather  begins  pass  gather  begins | left
    rank 1   pass  gather  begins  pass  gather  begins | pass  gather  begins | left

A rank that has left cannot know how often the others gather in a pass. So inside `join` every rank
that begins another pass, or leaves, says so in one more row; until then a rank that has left
answers with rows that change nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ...errors import MisuseError, warn
from .agreement import BEGINS, LEFT, in_words, stand_in, uneven
from .group import ranks_of

_CALL = "scaler.join()"


class ScalerPart(Joinable):
    """The scaler's part in torch's `Join`, after the model's."""

    def __init__(self, scaler: Any, model: Any) -> None:
        super().__init__()
        self.scaler, self.model = scaler, model
        self.agrees = scaler.process_group is not None
        self.in_pass = False

    def begin(self, *_: Any) -> None:
        """Before each forward pass, and before this rank leaves."""
        if self.in_pass and self.agrees:
            stand_in(BEGINS, self.join_process_group, self.join_device, _CALL)
        self.in_pass = True

    def join_hook(self, **_: Any) -> JoinHook:
        return StandIn(self)

    @property
    def join_device(self) -> Any:
        return self.model.join_device

    @property
    def join_process_group(self) -> Any:
        return self.model.join_process_group


class StandIn(JoinHook):
    """What a rank does that has left."""

    def __init__(self, part: ScalerPart) -> None:
        self.part = part

    def main_hook(self) -> None:
        """A forward pass of the others, with what they gather in it."""
        part = self.part
        while part.agrees and not stand_in(LEFT, part.join_process_group, part.join_device, _CALL):
            pass

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have left: the scaler's state is that of the last, as the model's weights are."""
        part, device = self.part, self.part.join_device
        group, ranks = part.join_process_group, ranks_of(part.join_process_group)
        last = torch.tensor([dist.get_rank() if is_last_joiner else -1], device=device)
        with in_words(ranks, _CALL):
            dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
            source = int(last)
            state = json.dumps(part.scaler.state_dict()).encode() if is_last_joiner else b""
            size = torch.tensor([len(state)], device=device)
            dist.broadcast(size, source, group=group)
            text = torch.zeros(int(size), dtype=torch.uint8, device=device)
            if dist.get_rank() == source:
                text.copy_(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            dist.broadcast(text, source, group=group)
        if is_last_joiner:
            return
        part.scaler.load_state_dict(json.loads(bytes(text.tolist())))
        if any(o.state for scale in part.scaler._scales.values() for o in scale.optimizers):
            warn(
                f"this rank left join() before rank {source}, so its optimizer has not made the "
                "last steps, and torch does not send the optimizer's state: load it from rank "
                f"{source} before the ranks train on together, or their weights part"
            )


@contextlib.contextmanager
def joined(scaler: Any, model: Any, *, enable: bool = True, **how: Any) -> Iterator[None]:
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise MisuseError(
            f"scaler.join() wants a DistributedDataParallel, this is {type(model).__name__}: torch "
            "has uneven inputs for DDP only"
        )
    group, named = model.process_group, scaler.process_group
    if named is not None and named is not group:
        raise MisuseError(
            "process_group= of this scaler is not the model's: a rank that leaves one of them "
            "could not stand in for the other. Give both the same group"
        )
    part = ScalerPart(scaler, model)
    disabled, parts = part._join_config, [model, part]
    if not enable:
        yield
        return
    hook = model.register_forward_pre_hook(part.begin)
    uneven.add(group)
    try:
        with Join(parts, **how):
            yield
            part.begin()
    finally:
        model._join_config = disabled
        uneven.discard(group)
        hook.remove()
