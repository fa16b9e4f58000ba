"""What differs between two runs: settings, figures, and the first step at which they part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..analysis import words
from ..journal import Run, Step
from .story import compact, settings, versions


class Parting(NamedTuple):
    """The first step at which two runs differ in something."""

    what: str
    step: int
    first: str
    second: str
    key: str = ""


_HIDDEN = ("time", "journal", "command")


def differing_settings(first: Run, second: Run) -> list[tuple[str, str, str]]:
    """Name and both values of each setting that is not the same; without time and paths.

    >>> differing_settings(Run(header={"rule": "auto"}), Run(header={"rule": "1024"}))
    [('rule', 'auto', '1024')]
    """
    a, b = _facts(first), _facts(second)
    names = [name for name in dict.fromkeys([*a, *b]) if name not in _HIDDEN]
    return [
        (name, a.get(name, words.UNKNOWN), b.get(name, words.UNKNOWN))
        for name in names
        if a.get(name) != b.get(name)
    ]


def _facts(run: Run) -> dict[str, str]:
    facts = {**settings(run), **versions(run)}
    for event in run.events:
        if event.what == "optimizer":
            name = str(event.detail.get("type", "optimizer")).rpartition(".")[2]
            for i, group in enumerate(event.detail.get("groups") or []):
                if isinstance(group, Mapping):
                    facts |= {f"{name}, group {i + 1}: {k}": compact(v) for k, v in group.items()}
    command = run.header.get("command")
    if isinstance(command, (list, tuple)):
        facts["arguments"] = compact([str(part) for part in command[1:]])
    return facts


def partings(first: Run, second: Run) -> list[Parting]:
    """For loss, outcome, scale and norm the first step that is not the same in both runs, earliest
    first. Steps are aligned by key and number; only steps that both runs have are compared.

    >>> a, b = [Step(0, 8.0, 8.0), Step(1, 8.0, 8.0)], [Step(0, 8.0, 4.0), Step(1, 4.0, 4.0)]
    >>> partings(Run(steps=a), Run(steps=b))
    [Parting(what='scale', step=1, first='2^3', second='2^2', key='')]
    """
    theirs = {(s.key, s.step): s for s in second.steps}
    found: dict[str, Parting] = {}
    for s in first.steps:
        other = theirs.get((s.key, s.step))
        if other is None:
            continue
        for what, (mine, its) in _pairs(s, other).items():
            if what not in found and mine != its and not (mine != mine or its != its):
                texts = _written(what, mine), _written(what, its)
                found[what] = Parting(what, s.step, *texts, s.key)
        if len(found) == len(_KINDS):
            break
    return sorted(found.values(), key=lambda p: (p.step, _KINDS.index(p.what)))


_KINDS = ("loss", "gradient norm", "scale", "outcome")


def _pairs(one: Step, other: Step) -> dict[str, tuple[Any, Any]]:
    return {
        "loss": (one.loss, other.loss),
        "gradient norm": (one.norm, other.norm),
        "scale": (one.scale, other.scale),
        "outcome": (_outcome(one), _outcome(other)),
    }


def _outcome(step: Step) -> str:
    return f"{step.verdict}: {step.cause}" if step.skipped else str(step.verdict or words.UNKNOWN)


def _written(what: str, value: Any) -> str:
    if what == "scale":
        return words.power(value)
    return value if isinstance(value, str) else words.number(value, 9)


def shared_steps(first: Run, second: Run) -> int:
    """How many steps both runs have.

    >>> shared_steps(Run(steps=[Step(0, 8.0, 8.0)]), Run(steps=[Step(1, 8.0, 8.0)]))
    0
    """
    return len({(s.key, s.step) for s in first.steps} & {(s.key, s.step) for s in second.steps})


def skipped_apart(first: Run, second: Run) -> tuple[list[int], list[int]]:
    """Steps that the first run skipped and the second did not, and the other way round."""
    a, b = ({(s.key, s.step) for s in run.steps if s.skipped} for run in (first, second))
    both = {(s.key, s.step) for s in first.steps} & {(s.key, s.step) for s in second.steps}
    return sorted({n for _, n in (a - b) & both}), sorted({n for _, n in (b - a) & both})
