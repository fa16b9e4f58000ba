"""gradlift explain: what a kind of finding means, and what to do."""

from __future__ import annotations

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from ..analysis.explain import explanation, kinds

_WIDTH = 100  # longer lines are hard to read


@click.command()
@click.argument("kind", required=False)
def explain(kind: str | None) -> None:
    """Print what KIND of finding means: how it is seen, what to do, what it is confused with.

    Without KIND all kinds are listed, with a line for each.
    """
    console = Console(highlight=False)
    if kind is None:
        _list(console)
        return
    text = explanation(kind)
    console.print(Text(kind, "bold"))
    console.print(Markdown(text), width=min(console.width, _WIDTH))


def _list(console: Console) -> None:
    wide = max(len(kind) for chapter in kinds().values() for kind in chapter)
    for title, chapter in kinds().items():
        console.print(Text(f"\n{title}", "bold"))
        for kind, sentence in chapter.items():
            console.print(Text(f"  {kind:{wide}}  {sentence.replace('`', '')}"), soft_wrap=True)
