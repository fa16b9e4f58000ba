"""A forward pass made once more: afterwards everything is as it was, and nothing was printed."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...torch.scaler.retrying import Replay
from ..patches import Patches


@contextlib.contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Inside, the module and its parts work on copies of their buffers. Afterwards they have their
    buffers and attributes again, and random states are put back.

    The buffers themselves are not written to: a graph that is still to be differentiated may have
    saved them, and would refuse to go on. What an attribute holds inside, such as the elements of
    a list, is not put back.

    >>> import torch
    >>> norm = nn.BatchNorm1d(2)
    >>> with as_it_was(norm):
    ...     _ = norm(torch.rand(4, 2))
    >>> norm.running_mean.tolist(), norm.running_mean._version
    ([0.0, 0.0], 0)
    """
    random = Replay(False)
    copies: dict[int, Tensor] = {}  # one for each, as several modules may share a buffer
    kept = []
    for m in module.modules():
        kept.append((m, dict(vars(m))))
        copied: dict[str, Any] = {}
        for name, b in m._buffers.items():
            if b is not None:
                b = copies.setdefault(id(b), b.detach().clone())
            copied[name] = b
        vars(m)["_buffers"] = copied
    try:
        yield
    finally:
        for m, attributes in kept:
            for name in vars(m).keys() - attributes.keys():
                del vars(m)[name]
            vars(m).update(attributes)
        random.restore()


class _Muted:
    """A stream that drops what this thread writes; other threads are none of our business."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.thread = stream, threading.get_ident()

    def write(self, text: str) -> Any:
        return len(text) if threading.get_ident() == self.thread else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drops what this thread prints and logs meanwhile.

    >>> with silence():
    ...     print("not to be seen")
    """
    me, plain = threading.get_ident(), logging.Logger.handle

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != me:
            plain(logger, record)

    patches = Patches()
    patches.attribute(logging.Logger, "handle", handle)
    for name in ("stdout", "stderr"):
        patches.attribute(sys, name, _Muted(getattr(sys, name)))
    try:
        yield
    finally:
        patches.restore()
