"""gradlift formats: the number formats and their limits."""

from __future__ import annotations

import math

import click
from rich import box
from rich.console import Console
from rich.table import Table

from ..formats import ALL


def _power(x: float) -> str:
    return f"2^{math.log2(x):.0f}"


@click.command()
def formats() -> None:
    """Print the number formats and their limits."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("format", style="bold", no_wrap=True)
    columns = "bits", "max", "normal", "subnormal", "eps", "binades", "inf"
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for f in ALL:
        binades = f.max_exponent - round(math.log2(f.smallest_subnormal)) + 1
        table.add_row(
            f.name,
            f"1+{f.exponent_bits}+{f.mantissa_bits}",
            f"{f.max:.5g}",
            _power(f.smallest_normal),
            _power(f.smallest_subnormal),
            _power(f.eps),
            str(binades),
            "yes" if f.has_infinity else "no",
        )
    console = Console()
    console.print(table)
    console.print("normal, subnormal: the smallest of each. bits: sign + exponent + mantissa.")
