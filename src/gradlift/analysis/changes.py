"""The advice of a finding as a change of the script's own lines, where these are known.

    train.py:57
    +    scaler.unscale_(optimizer)
         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

The first line is a place. A line that begins with "+" comes, with "-" goes, with a blank stays.
Names of variables are those of the script. What cannot be written for certain is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ..journal import Call, Run
from .findings.finding import Finding
from .source import Source, line_at, source_of

_SCALER = re.compile(r"([\w.]+)\.(?:scale|step|update|unscale_)\(")
_STEPPED = re.compile(r"([\w.]+)\.step\(([\w.]+)")
_STEP = re.compile(r"([\w.]+)\.(?:step|zero_grad)\(")
_SCALED = re.compile(r"\.scale\(([^()]+|[^()]*\([^()]*\)[^()]*)\)\.backward\(")
_BACKWARD = re.compile(r"^(\s*)([\w.]+)\.backward\(")


def change(run: Run, finding: Finding) -> str:
    """The change that cures a finding; "" if the lines or the cure are not known.

    >>> from gradlift.journal import Calls, Event
    >>> lines = {"7": "    scaler.step(opt)", "8": "    opt.step()"}
    >>> source = Event(None, "source", {"file": "train.py", "lines": lines})
    >>> order = (Call("scaler.step", "train.py:7"), Call("optimizer.step", "train.py:8"))
    >>> run = Run(calls=[Calls(0, order)], events=[source])
    >>> print(change(run, Finding("broken", "", "", kind="step-twice", place="train.py:8")))
    train.py:8
    -    opt.step()
    """
    write = _CHANGES.get(finding.kind)
    source = source_of(run)
    text = line_at(source, finding.place)
    if write is None or text is None or not text.strip():
        return ""
    lines = list(write(_Script(run, source), finding.place, text))
    return "\n".join([finding.place, *lines]) if lines else ""


class _Script:
    """The lines of the calls, and the names of the variables in them."""

    def __init__(self, run: Run, source: Source) -> None:
        self.run, self.source = run, source

    def texts(self, *names: str) -> Iterator[tuple[Call, str]]:
        """Calls of these names with their lines."""
        for calls in self.run.calls:
            for call in calls.order:
                text = line_at(self.source, call.place) if call.name in names else None
                if text is not None:
                    yield call, text

    def found(self, expression: re.Pattern[str], *names: str) -> str:
        """The first group of an expression in the lines of these calls."""
        matches = (expression.search(text) for _, text in self.texts(*names))
        return next((m[1] for m in matches if m), "")

    @property
    def scaler(self) -> str:
        return self.found(_SCALER, "scale", "scaler.step", "update", "unscale_")

    def optimizer(self, place: str) -> str:
        """Of the window in which a line was executed; the only one of the script, else ""."""
        stepped = [m[2] for _, t in self.texts("scaler.step") if (m := _STEPPED.search(t))]
        calls = self.texts("optimizer.step", "zero_grad")
        names = {*stepped, *(m[1] for _, t in calls if (m := _STEP.search(t)))}
        return names.pop() if len(names) == 1 else ""

    def behind(self, place: str, name: str) -> tuple[str, str] | None:
        """Place and line of a call after a line, in the same window."""
        for calls in self.run.calls:
            places = [call.place for call in calls.order]
            if place in places:
                for call in calls.order[places.index(place) :]:
                    text = line_at(self.source, call.place)
                    if call.name == name and text is not None:
                        return call.place, text
        return None


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _between(script: _Script, first: str, last: str) -> list[str] | None:
    """The lines between two places of one file; None if one was not recorded."""
    file, _, begin = first.rpartition(":")
    other, _, end = last.rpartition(":")
    lines = script.source.get(file, {})
    numbers = range(int(begin) + 1, int(end)) if file == other else range(-1)
    if file != other or len(numbers) > 5 or any(n not in lines for n in numbers):
        return None
    return [f" {lines[n]}" for n in numbers]


def _removed(script: _Script, place: str, text: str) -> Iterator[str]:
    yield f"-{text}"


def _unscaled_first(script: _Script, place: str, text: str) -> Iterator[str]:
    if "clip_grad" not in text:
        return
    scaler, optimizer = script.scaler, script.optimizer(place)
    later = script.behind(place, "unscale_")
    between = _between(script, place, later[0]) if later else []
    if not scaler or not optimizer or between is None:
        return
    yield f"+{_indent(text)}{scaler}.unscale_({optimizer})"
    yield f" {text}"
    if later:
        yield from between
        yield f"-{later[1]}"


def _updated(script: _Script, place: str, text: str) -> Iterator[str]:
    found = _STEPPED.search(text)
    if found and not any(True for _ in script.texts("update")):  # one that is elsewhere is moved
        yield f" {text}"
        yield f"+{_indent(text)}{found[1]}.update()"


def _stepped_by_scaler(script: _Script, place: str, text: str) -> Iterator[str]:
    found, scaler = re.match(r"\s*([\w.]+)\.step\(\)\s*$", text), script.scaler
    if not found or not scaler:
        return
    yield f"-{text}"
    yield f"+{_indent(text)}{scaler}.step({found[1]})"
    if not any(True for _ in script.texts("update")):
        yield f"+{_indent(text)}{scaler}.update()"


def _cleared(script: _Script, place: str, text: str) -> Iterator[str]:
    optimizer = script.optimizer(place)
    if optimizer and ".backward(" in text:
        yield f"+{_indent(text)}{optimizer}.zero_grad()"
        yield f" {text}"


def _scaled(script: _Script, place: str, text: str) -> Iterator[str]:
    found, scaler = _BACKWARD.match(text), script.scaler
    if found and scaler:
        yield f"-{text}"
        rest = text[found.end() :]
        yield f"+{found[1]}{scaler}.scale({found[2]}).backward({rest}"


def _divided(script: _Script, place: str, text: str) -> Iterator[str]:
    times = max((c.times for c, t in script.texts("backward") if c.place == place), default=1)
    found = _SCALED.search(text)
    plain = _BACKWARD.match(text)
    if times < 2 or not (found or plain):
        return
    yield f"-{text}"
    if found:
        loss = found[1] if re.fullmatch(r"[\w.]+", found[1]) else f"({found[1]})"
        yield f"+{text[: found.start(1)]}{loss} / {times}{text[found.end(1) :]}"
    elif plain:
        yield f"+{plain[1]}({plain[2]} / {times}).backward({text[plain.end() :]}"


_CHANGES: dict[str, Callable[[_Script, str, str], Iterator[str]]] = {
    "clip-scaled": _unscaled_first,
    "unscale-missing": _unscaled_first,
    "update-missing": _updated,
    "step-beside-scaler": _stepped_by_scaler,
    "step-twice": _removed,
    "zero-grad-missing": _cleared,
    "loss-not-scaled": _scaled,
    "accumulation-not-divided": _divided,
}
