"""What each kind of finding means: the sections in explained/, one for each kind.

A section is plain Markdown: a sentence, four paragraphs that begin in bold (what it means, how it
is seen, what to do, what it is confused with), and mostly a block of `diff` with a fault and its
cure.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib.resources import files

from ..errors import SettingsError
from ..text import shown

_HEADING = re.compile(r"^## (\S+)\n+", re.MULTILINE)


def explanation(kind: str) -> str:
    """The section about a kind of finding, in Markdown without its heading.

    >>> print(explanation("clip-scaled").splitlines()[0])
    Gradients are clipped while they still carry the loss scale.
    >>> explanation("clip")
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: no finding has the kind 'clip': did you mean 'clip-scaled'?
    """
    known = {k: text for chapter in _chapters().values() for k, text in chapter.items()}
    if kind in known:
        return known[kind]
    near = [k for k in known if kind and kind in k]
    near += difflib.get_close_matches(kind, known, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else "`gradlift explain` lists all kinds"
    raise SettingsError(f"no finding has the kind {shown(kind)}: {hint}")


def known_kinds() -> set[str]:
    """Every kind that has a section.

    >>> "clip-scaled" in known_kinds()
    True
    """
    return {kind for chapter in _chapters().values() for kind in chapter}


def kinds() -> dict[str, dict[str, str]]:
    """Each kind with its first sentence, by the chapter that it is in.

    >>> kinds()["How a run ended, and its ranks"]["killed"]
    'The journal stops without an ending.'
    """
    return {
        title: {kind: text.partition("\n")[0] for kind, text in chapter.items()}
        for title, chapter in _chapters().items()
    }


@cache
def _chapters() -> dict[str, dict[str, str]]:
    found = {}
    folder = files(__name__.rpartition(".")[0]) / "explained"
    for page in sorted(folder.iterdir(), key=lambda page: page.name):
        title, *parts = _HEADING.split(page.read_text(encoding="utf-8"))
        sections = zip(parts[::2], map(str.strip, parts[1::2]))
        found[title.strip("# \n")] = dict(sections)
    return found
