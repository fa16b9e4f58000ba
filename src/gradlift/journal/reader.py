"""Reads a journal. Of one that was cut off or damaged, all sound lines are read."""

from __future__ import annotations

import gc
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..core import Cause, Verdict
from ..errors import JournalError, JournalWarning, warn
from .records import NAN, Call, Calls, Event, Probe, Run, Sample, Step
from .validation import (
    LONGEST_LINE,
    Distinct,
    by_name,
    calls,
    count,
    detail,
    header,
    number,
    text,
    texts,
)

SCHEMA = 1
JOURNAL = "journal.jsonl"  # its name in a run's folder
_HEAD = b'{"kind":"header","schema":'


def read_journal(path: str | os.PathLike[str]) -> Run:
    """Reads a run from a journal, or from the folder that holds it. Damaged and cut-off lines are
    left out, with one warning.

    Raises JournalError for what is not a journal and for a later schema.

    >>> read_journal("nowhere.jsonl")
    Traceback (most recent call last):
        ...
    gradlift.errors.JournalError: cannot read nowhere.jsonl: No such file or directory
    """
    path = journal_at(path)
    with open_journal(path) as file:
        data = file.read()
    if not data:
        _warned(f"{path} is empty: it has no line")
        return Run(path=path)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line end
    check_head(lines[0], path)
    run = Run(path=path)
    damaged = add_lines(lines, run, Distinct())
    if damaged:
        _warned(
            f"{path}: {damaged} damaged or cut-off line{'s' * (damaged > 1)} left out, "
            f"{len(run.steps)} steps read"
        )
    return run


def journal_at(path: str | os.PathLike[str]) -> Path:
    """The journal itself, where the folder of a run is given.

    >>> journal_at("run.jsonl").name
    'run.jsonl'
    """
    path = Path(path)
    try:
        if not path.is_dir():
            return path
        journal = path / JOURNAL
        if journal.is_symlink() and path.resolve() not in journal.resolve().parents:
            raise JournalError(
                f"{journal} is a symbolic link that leads out of its folder, and is not followed. "
                "If it is the file you mean, give its own path"
            )
    except (OSError, RuntimeError) as error:  # a name too long, a folder that is closed, a loop
        raise _unreadable(path, error) from error
    return journal


def _unreadable(path: Path, error: Exception) -> JournalError:
    return JournalError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


@contextmanager
def open_journal(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading. A pipe or a device is refused: it may have no end, or no writer.

    >>> with open_journal(Path(os.devnull)) as file:  # what a rank writes that has no folder
    ...     file.read()
    b''
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) and str(path) != os.devnull:
                raise JournalError(f"cannot read {path}: it is no regular file")
            yield file
    except JournalError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _unreadable(path, error) from error


def add_lines(lines: list[bytes], run: Run, distinct: Distinct) -> int:
    """Adds lines of a journal to `run`; returns how many were damaged, and so left out. `distinct`
    is the journal's, whose lines may come in several calls."""
    collecting = gc.isenabled()
    gc.disable()  # no garbage arises here, and collecting takes a quarter of the time
    try:
        return sum(line is None or not _take(line, run, distinct) for line in _parsed(lines))
    finally:
        if collecting:
            gc.enable()


def _parsed(lines: list[bytes]) -> Iterator[Any]:
    """Each line's value, None for a damaged one. Parsed a block at a time: twice as fast."""
    for start in range(0, len(lines), 4096):
        block = lines[start : start + 4096]
        try:
            if max(map(len, block)) <= LONGEST_LINE:
                values = json.loads(b"[" + b",".join(block) + b"]")
                if len(values) == len(block):
                    yield from values
                    continue
        except (ValueError, RecursionError):
            pass
        for line in block:
            try:
                yield json.loads(line) if len(line) <= LONGEST_LINE else None
            except (ValueError, RecursionError):
                yield None


def _take(line: Any, run: Run, distinct: Distinct) -> bool:
    """Adds one line to the run; False if it is damaged. Lines of an unknown kind are ignored."""
    try:
        kind = line["kind"]
        if kind == "step":
            step = _step(line)
            distinct.key(step.key)
            distinct.names(step.culprits)
            run.steps.append(step)
        elif kind == "event":
            rest = {k: v for k, v in line.items() if k not in ("kind", "step", "what")}
            at = line["step"] if line["step"] is None else count(line["step"])
            found = detail(line["what"], rest)
            distinct.names(found.get("culprits", ()))
            run.events.append(Event(at, text(line["what"]), found))
        elif kind == "sample":
            sample = Sample(count(line["step"]), by_name(line["parameters"]))
            distinct.names(sample.parameters)
            run.samples.append(sample)
        elif kind == "probe":
            probe = Probe(count(line["step"]), by_name(line["modules"]))
            distinct.names(probe.modules)
            run.probes.append(probe)
        elif kind == "forward":
            look = Probe(count(line["step"]), by_name(line["modules"]))
            distinct.names(look.modules)
            run.forwards.append(look)
        elif kind == "weights":
            weights = Sample(count(line["step"]), by_name(line["parameters"]))
            distinct.names(weights.parameters)
            run.weights.append(weights)
        elif kind == "calls":
            order = tuple(Call(*each) for each in calls(line["order"]))
            distinct.names(call.place for call in order)
            run.calls.append(Calls(count(line["step"]), order, count(line["count"])))
        elif kind == "header":
            _check_schema(line["schema"], run.path)
            facts = header(line)
            if run.header:  # the journal was continued by a later process
                last = run.steps[-1].step if run.steps else None
                run.events.append(Event(last, "resume", facts))
            else:
                run.header.update(facts)
    except JournalError:
        raise
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _step(line: dict[str, Any]) -> Step:
    get = line.get
    nonfinite = get("nonfinite", False)
    if type(nonfinite) is not bool:
        raise ValueError("not true or false")
    verdict = get("verdict")
    cause = get("cause")
    return Step(
        count(line["step"]),
        number(line["scale"]),
        number(line["next_scale"]),
        number(get("amax", NAN)),
        nonfinite,
        number(get("loss", NAN)),
        number(get("norm", NAN)),
        number(get("lr", NAN)),
        Verdict.APPLY if verdict is None else None if verdict == "None" else Verdict(verdict),
        Cause.NONE if cause is None else Cause[cause],
        tuple(texts(get("culprits", []))),
        count(get("retries", 0)),
        number(get("seconds", NAN)),
        number(get("probe_amax", NAN)),
        text(get("key", "")),
    )


def is_journal(path: Path) -> bool:
    """Does the file begin like a journal? An empty one may become one.

    >>> is_journal(Path(os.devnull))
    True
    """
    with open_journal(path) as file:
        head = file.read(len(_HEAD))
    return head == _HEAD or _HEAD.startswith(head)


def check_head(line: bytes, path: Path) -> None:
    """Raises unless the file starts like a journal; a header that is cut off is accepted."""
    if not (line.startswith(_HEAD) or (_HEAD.startswith(line) and line)):
        raise JournalError(f"{path} is not a gradlift journal: its first line is no header")
    number, comma, _ = line[len(_HEAD) :].rstrip(b"}\n").partition(b",")
    if comma or line.rstrip(b"\n").endswith(b"}"):
        _check_schema(int(number) if number.isdigit() and len(number) < 20 else None, path)


def _check_schema(schema: Any, path: Path | None) -> None:
    if type(schema) is not int:
        raise JournalError(f"{path} is not a gradlift journal: its schema is {schema!r}")
    if schema > SCHEMA:
        raise JournalError(
            f"{path} was written by a later gradlift (schema {schema}, this one reads {SCHEMA}): "
            "upgrade gradlift to read it"
        )


def _warned(message: str) -> None:
    warn(message, JournalWarning)
