"""The texts of a report: the summary sentence, figures, events, settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..analysis import words
from ..analysis.coverage import coverage
from ..analysis.diagnosis import Finding
from ..analysis.findings.ending import END
from ..analysis.totals import Totals
from ..journal import Event, Run
from ..text import visible
from .modules import Module
from .thinning import Mark, crowded, spread

MOST_ROWS = 2000


class EventRow(NamedTuple):
    """One line of the list of events."""

    first: int | None
    last: int | None
    what: str
    text: str
    cause: str = ""


def title(run: Run) -> str:
    """The title of a run: its folder, or its file.

    >>> from pathlib import Path
    >>> title(Run(path=Path("gradlift-runs/train-1/journal.jsonl"))), title(Run())
    ('train-1', 'a run')
    """
    if run.path is None:
        return "a run"
    path = run.path.resolve() if run.path.name == str(run.path) else run.path
    return visible(path.parent.name if path.name == "journal.jsonl" else path.name)


def verdict(run: Run, findings: Sequence[Finding]) -> tuple[str, str]:
    """The severity ("empty", "broken", "warning", "hint" or "healthy"), and the sentence.

    Only a run that was looked at from all sides is called healthy.

    >>> verdict(Run(), [])
    ('empty', 'Nothing was recorded: this journal holds no step.')
    """
    if not run.steps and not findings:
        return "empty", "Nothing was recorded: this journal holds no step."
    steps = words.count(len(run.steps), "step")
    if not findings:
        if coverage(run).complete:
            return "healthy", f"Healthy: nothing wrong was found in {steps}."
        return "healthy", f"Nothing wrong was found in what was recorded of {steps}."
    worst = findings[0]
    lead = {"broken": "Training is broken", "warning": "It trains, but look at this"}
    severity = worst.severity if worst.severity in lead else "hint"
    sentence = f"{lead.get(severity, 'Healthy, and it could be better')}: {_lowered(worst.title)}"
    more = f" And {words.count(len(findings) - 1, 'more finding')}." if len(findings) > 1 else ""
    return severity, sentence.rstrip(".") + "." + more


def _lowered(sentence: str) -> str:
    """Small first letter, unless the first word is a name such as FP16."""
    first = sentence.split(" ", 1)[0]
    return sentence[:1].lower() + sentence[1:] if first[1:].islower() else sentence


def figures(totals: Totals) -> list[tuple[str, str, str]]:
    """The head's figures: name, value, remark."""
    lost = words.percent(totals.skipped / totals.trained) if totals.steps else ""
    of = f"of {totals.trained:,}, " if totals.trained > totals.steps else ""
    seldom = [words.counted(totals.causes)] if totals.causes else []
    seldom += [words.count(totals.retries, "retry", "retries")] if totals.retries else []
    seldom += [f"{totals.undecided:,} undecided"] if totals.undecided else []
    empty = [f"{totals.without_gradients:,} without gradients"] if totals.without_gradients else []
    scale = words.power(totals.first_scale), words.power(totals.last_scale)
    low, high = words.power(totals.lowest_scale), words.power(totals.highest_scale)
    tightest = totals.worst_headroom_step
    return [
        ("steps", f"{totals.steps:,}", of + ", ".join([f"{totals.applied:,} applied", *empty])),
        (
            "skipped",
            f"{totals.skipped:,}",
            ", ".join(([lost] if totals.skipped else []) + seldom) or "none",
        ),
        ("scale", " -> ".join(dict.fromkeys(scale)), f"between {low} and {high}"),
        (
            "worst headroom",
            words.bits(totals.worst_headroom),
            "not recorded" if tightest is None else f"at step {tightest:,}",
        ),
        (
            "flushed",
            words.percent(totals.flushed),
            "no samples" if totals.flushed != totals.flushed else "of sampled elements are zero",
        ),
        (
            "loss",
            " -> ".join(map(words.number, (totals.first_loss, totals.last_loss))),
            "not recorded" if totals.first_loss != totals.first_loss else "first and last step",
        ),
        (
            "step time",
            words.duration(totals.step_seconds),
            f"median; {words.duration(totals.all_seconds)} in all"
            if totals.all_seconds == totals.all_seconds
            else "not recorded",
        ),
    ]


def inside(module: Module, lifted: bool) -> list[str]:
    """One module's cells: headroom, zero, subnormal, near the top, and its lift if any has one."""
    bits = f"{module.headroom:.1f}" if module.headroom == module.headroom else words.UNKNOWN
    shares = [words.percent(x) for x in (module.zero, module.subnormal, module.near_max)]
    return [bits, *shares, *([words.power(module.lift)] if lifted else [])]


def rows(run: Run, marks: list[Mark]) -> list[EventRow]:
    """Events in the order of steps; neighbouring ones that are alike share a row."""
    bad = [
        EventRow(m.first, m.last, m.what, _of_mark(m), m.cause) for m in crowded(marks, MOST_ROWS)
    ]
    apart = ("skip", "retry", "halt", "optimizer", "trained")
    others = [e for e in run.events if e.what not in apart or e.step is None]
    others = [e for e in others if e.what != "source"]
    shown = [others[i] for i in spread(len(others), MOST_ROWS)]
    rest = [EventRow(e.step, e.step, e.what, _of_event(e)) for e in shown]
    if len(shown) < len(others):
        text = f"{len(others) - len(shown):,} other events are not shown"
        rest.append(EventRow(None, None, "note", text))
    return sorted(bad + rest, key=_when)


def _when(row: EventRow) -> float:
    if row.first is not None:
        return row.first
    return math.inf if row.what == END else -1


def _of_mark(mark: Mark) -> str:
    text = f"{mark.cause} at scale {words.power(mark.scale)}"
    if mark.next_scale == mark.next_scale and mark.next_scale != mark.scale:
        text += f", then {words.power(mark.next_scale)}"
    if mark.culprit:
        text += f"; {mark.culprit}"
        text += f" and {mark.others:,} more" if mark.others else ""
    if mark.key:
        text += f" (loss {mark.key!r})"
    return f"{mark.times:,} times: {text}" if mark.times > 1 else text


def _of_event(event: Event) -> str:
    detail = event.detail
    if event.what == "origin":
        parts = (detail.get(name) for name in ("op", "module", "place", "input"))
        where = ", ".join(str(part) for part in parts if part)
        return f"first {detail.get('found', 'non-finite')} ({detail.get('where', '?')}): {where}"
    if event.what == END:
        facts = (detail.get(name) for name in ("how", "status", "type", "message"))
        return ": ".join(compact(fact) for fact in facts if fact)
    if event.what == "resume":
        return f"a later process continued the run, {detail.get('time', 'time unknown')}"
    if isinstance(detail.get("text"), str):
        return str(detail["text"])
    return compact(detail)


def looks(run: Run) -> list[str]:
    """Two sentences: what was looked at, and what was not."""
    seen = coverage(run)
    lines = [f"Looked at: {'; '.join(seen.looked)}."] if seen.looked else []
    return lines + ([f"Not looked at: {'; '.join(seen.not_looked)}."] if seen.not_looked else [])


def settings(run: Run) -> dict[str, str]:
    """The run's header, without what is shown elsewhere."""
    header = run.header
    parameters = header.get("parameters")
    text = {}
    if isinstance(parameters, Mapping):
        elements = sum(n for n in parameters.values() if isinstance(n, int))
        text["parameters"] = f"{words.count(len(parameters), 'tensor')}, {elements:,} elements"
    hidden = ("kind", "parameters", "versions")
    for name, value in header.items():
        if name not in hidden and value is not None:
            text[name.replace("_", " ")] = compact(value)
    if run.path is not None:
        text["journal"] = visible(str(run.path))
    return text


def versions(run: Run) -> dict[str, str]:
    """Python, gradlift and the frameworks, as recorded."""
    recorded = run.header.get("versions")
    return {k: str(v) for k, v in recorded.items()} if isinstance(recorded, Mapping) else {}


def compact(value: Any, most: int = 300) -> str:
    """Any value of a journal in one short line.

    >>> compact("backoff"), compact(["python", "train.py"]), compact({"a": 1})
    ('backoff', 'python train.py', '{"a": 1}')
    """
    if isinstance(value, str):
        text = value
    elif isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        text = " ".join(value)
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= most else text[: most - 3] + "..."
