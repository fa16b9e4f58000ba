"""Functions that `torch.compile` runs as they are: it breaks its graph around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Marks a function, so that neither it nor what it calls is compiled.

    `torch.compiler.disable` does the same by a wrapper, which costs three calls a step, and needs
    the compiler, which takes a second to import.

    >>> @uncompiled
    ... def double(x):
    ...     return 2 * x
    >>> double(4)
    8
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "loss scaling decides on numbers"  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
