"""gradlift selftest: does this device give the same results as the CPU?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..analysis.words import count, duration
from ..errors import GradliftError

if TYPE_CHECKING:
    import torch

_WORDS = {True: ("passed", "green"), False: ("failed", "bold red"), None: ("not applicable", "dim")}


@click.command()
@click.option("--device", "name", help="A torch device: cuda, cuda:1, mps, xpu, cpu.")
def selftest(name: str | None) -> None:
    """Check in about a minute that an accelerator gives the same results as the CPU.

    The exit status is 1 if a check failed.
    """
    device = _device(name)
    from ..selftest.checks import CHECKS, outcomes

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("")
    table.add_column("time", justify="right", no_wrap=True)
    seen = []
    with console.status(_progress(0, len(CHECKS))) as status:
        for outcome in outcomes(device):
            seen.append(outcome)
            status.update(_progress(len(seen), len(CHECKS)))
            word, style = _WORDS[outcome.held]
            cell = Text(f"{word}: {outcome.reason}" if outcome.reason else word, style=style)
            table.add_row(Text(outcome.name), cell, duration(outcome.seconds))
    console.print(Text(_described(device)))
    console.print(table)
    counts = [sum(outcome.held is kind for outcome in seen) for kind in (True, False, None)]
    console.print(f"{counts[0]} passed, {counts[1]} failed, {counts[2]} not applicable")
    if counts[1]:
        raise SystemExit(1)


def _progress(done: int, whole: int) -> str:
    return f"{done} of {count(whole, 'check')} done"


def _device(name: str | None) -> torch.device:
    """The device by name, or the best there is; an error in one line if it cannot be used."""
    # bfloat16 products crash on some virtual machines that advertise AMX; set before torch loads.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    try:
        import torch
    except ImportError:
        raise GradliftError("the selftest needs PyTorch: pip install 'gradlift[torch]'") from None
    name = name or _best()
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch raises either, or a subclass
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise GradliftError(f"cannot use the device {name!r}: {first.split('. ')[0]}") from None
    return device


def _best() -> str:
    import torch

    for kind, there in (
        ("cuda", torch.cuda.is_available),
        ("xpu", torch.xpu.is_available),
        ("mps", torch.backends.mps.is_available),
    ):
        if there():
            return kind
    return "cpu"


def _described(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)}), torch {torch.__version__}"
    if device.type == "cpu":
        return f"cpu, by an accelerator's path, torch {torch.__version__}"
    return f"{device}, torch {torch.__version__}"
