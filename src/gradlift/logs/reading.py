"""Files in, a `Run` out. Which format a file has is recognised by its name and its lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core import Cause
from ..errors import LogError
from ..journal import JOURNAL, Event, Run, Step, read_journal
from ..journal.reader import is_journal, journal_at, open_journal
from ..text import visible
from .assembly import Assembly
from .console import LINE_FORMATS, Console, of_pattern
from .formats import FileFormat, LineFormat
from .lines import Lines
from .row import Row
from .tables import CSV, STATE, Table, looks_like_csv, trainer_state
from .tensorboard import TENSORBOARD, is_event_file, rows

FORMATS: tuple[LineFormat | FileFormat, ...] = (*LINE_FORMATS, CSV, STATE, TENSORBOARD)
"""Every format that is read. docs/logs.md has them as a table."""

_BLOCK = 2**22  # bytes
_STATE = "trainer_state.json"
_EVALUATION = re.compile(r"(?i:val|valid\d*|validation|eval|evaluation|test)")
_MOST_FILES = 1000  # of a folder
_NUMBERS = ("loss", "norm", "lr", "scale", "next_scale")  # of a step; NaN where not known


def read_run(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    pattern: str | None = None,
) -> Run:
    """A run from a journal, its folder, or somebody's log; several files are one run's logs.

    >>> read_run("nowhere.log")
    Traceback (most recent call last):
        ...
    gradlift.errors.JournalError: cannot read nowhere.log: No such file or directory
    """
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if format is None and pattern is None and len(several) == 1:
        given = Path(several[0])
        path = journal_at(given)
        if path.exists() if path != given else is_journal(path):
            return read_journal(path)
    return read_log(several, format=format, pattern=pattern)


def read_log(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    pattern: str | None = None,
) -> Run:
    """A run from logs: a file, a folder, or several of them, in the order of time.

    `format` is the name of one of `FORMATS`, where the file does not show it; `pattern` a regular
    expression for lines of any other format, with named groups.

    >>> from tempfile import NamedTemporaryFile as File
    >>> with File("w", suffix=".log") as log:
    ...     _ = log.write("iter 0: loss 4.25, time 97.01ms, mfu 1.0%"), log.flush()
    ...     run = read_log(log.name)
    >>> run.header["formats"], run.steps[0].loss
    (['nanogpt'], 4.25)
    """
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not several:
        raise LogError("no file was given")
    chosen = _chosen(format)
    read = [_read(file, chosen, pattern) for path in several for file in _files(Path(path))]
    if not any(run.steps or run.events for run in read):
        names = ", ".join(visible(str(path)) for path in several[:3])
        known = ", ".join(each.name for each in FORMATS)
        raise LogError(
            f"{names} is not a gradlift journal, and no line is of a known format ({known}). "
            "Name the format with --format, or describe its lines with --pattern"
        )
    run = _together(read)
    return Run(run.header, run.steps, events=run.events, path=Path(several[0]))


def whole_file(path: str | os.PathLike[str]) -> bool:
    """Is this read as a whole, and not line by line: a folder, event files, trainer_state.json?

    >>> whole_file("trainer_state.json"), whole_file("train.log")
    (True, False)
    """
    path = Path(path)
    return path.is_dir() or path.name == _STATE or is_event_file(path.name)


def sizes(path: str | os.PathLike[str]) -> tuple[int, float]:
    """Bytes and the latest time of change of the logs that `read_log` reads here."""
    found = [file.stat() for file in _files(Path(path))]
    return sum(each.st_size for each in found), max(each.st_mtime for each in found)


class LogReader:
    """A console's log or a table that may grow: bytes in, steps out.

    >>> reader = LogReader()
    >>> reader.feed(b"iter 0: loss 4.25, time 97.01ms, mfu 1.0%")
    >>> reader.end().steps[0].loss
    4.25
    """

    def __init__(self, formats: Sequence[str] = (), pattern: str | None = None) -> None:
        wanted = [f for f in LINE_FORMATS if not formats or f.name in formats]
        self._lines = Lines()
        self._console = Console([of_pattern(pattern)] if pattern else wanted)
        self._table: Table | None = None
        self._tables = not pattern and (not formats or CSV.name in formats)
        self._begun = self._named = False
        self._given = self._told = 0

    def feed(self, block: bytes) -> None:
        """Reads the lines that this block ends."""
        self._take(self._lines.feed(block))

    def new(self) -> Run:
        """The steps and resumes since the last call; a step that the next lines may still add to
        is left."""
        steps, events = self._console.assembly.steps, self._console.assembly.events
        given, self._given = min(self._given, len(steps)), len(steps)
        told, self._told = self._told, len(events)
        header = self._header() if self._console.found and not self._named else {}
        self._named |= bool(header)
        return Run(header, steps[given:], events=events[told:])

    def end(self) -> Run:
        """Everything; no block will follow."""
        self._take(self._lines.end())
        self._console.end()
        assembly = self._console.assembly
        return Run(self._header(), assembly.steps, events=_events(assembly))

    def _take(self, lines: list[str]) -> None:
        lines = [line for line in lines if line] if not self._begun else lines
        if not lines:
            return
        if not self._begun and self._tables and looks_like_csv(lines[0]):
            self._table = Table(lines.pop(0))
        self._begun = True
        if self._table is None:
            self._console.feed(lines)
            return
        for line in lines:
            for row in self._table.read(line):
                self._console.take(row)

    def _header(self) -> dict[str, Any]:
        return _header(self._console.found, self._console.assembly)


def _chosen(format: str | None) -> tuple[str, ...]:
    if format is None:
        return ()
    names = [each.name for each in FORMATS]
    if format not in names:
        raise LogError(f"the format is {format!r}, expected one of {', '.join(names)}")
    return (format,)


def _files(path: Path) -> Iterator[Path]:
    """The logs of a folder: event files, the newest trainer_state.json, tables."""
    if not path.is_dir():
        yield path
        return
    inside: list[Path] = []
    for folder, names, files in os.walk(path):
        names.sort()
        inside += (Path(folder) / name for name in sorted(files))
        if len(inside) > _MOST_FILES:
            break
    inside = [file for file in inside[:_MOST_FILES] if not file.is_symlink()]
    inner = {file.parent.parent for file in inside if file.parent.name == "train_inner"}
    inside = [f for f in inside if not _of_an_evaluation(f, path, inner)] or inside
    states = [file for file in inside if file.name == _STATE]
    found = [file for file in inside if is_event_file(file.name) or file.suffix == ".csv"]
    found += [max(states, key=lambda file: file.stat().st_mtime)] if states else []
    found = found or [file for file in inside if file.suffix in (".log", ".out", ".txt")]
    if not found:
        raise LogError(
            f"{path} holds no {JOURNAL}, no event files, no {_STATE} and no .csv, .log, .out or "
            ".txt file"
        )
    yield from found


def _of_an_evaluation(file: Path, folder: Path, inner: set[Path]) -> bool:
    """Is it in a folder of the validation's numbers, which have the same names (Keras, fairseq)?
    fairseq's `train` has the means of epochs, and `train_inner` beside it the training itself."""
    names = file.relative_to(folder).parts[:-1]
    epochs = file.parent.name == "train" and file.parent.parent in inner
    return epochs or any(_EVALUATION.fullmatch(name) for name in names)


def _read(path: Path, formats: Sequence[str], pattern: str | None) -> Run:
    """One file."""
    with open_journal(path) as file:
        if is_event_file(path.name) or formats == (TENSORBOARD.name,):
            return _of_rows(rows(file), TENSORBOARD.name)
        if path.name == _STATE or formats == (STATE.name,):
            return _of_rows(trainer_state(file, path), STATE.name)
        reader = LogReader(formats, pattern)
        while block := file.read(_BLOCK):
            reader.feed(block)
    return reader.end()


def _of_rows(found: Iterable[Row], name: str) -> Run:
    assembly, n = Assembly(), 0
    for n, row in enumerate(found, 1):
        assembly.add(row, n)
    assembly.end()
    return Run(_header({name: n} if n else {}, assembly), assembly.steps, events=_events(assembly))


def _header(found: dict[str, int], assembly: Assembly) -> dict[str, Any]:
    """What is known of a log as a whole; the coverage and the findings of a log rest on it."""
    known = {each.name: each for each in FORMATS}
    cannot = [what for name in found if name in known for what in known[name].cannot]
    return {
        "mode": "log",
        "formats": list(found),
        "lines": sum(found.values()),
        "cannot_know": list(dict.fromkeys(cannot)),
        "guessed": assembly.guessed,
        "repeated": assembly.repeated,
        "left_out": assembly.thinned,
        "hysteresis": assembly.kept_scale,
        "quiet": 0 in found.values(),
    }


def _events(assembly: Assembly) -> list[Event]:
    """The events of the log, and one for each step that was not applied, as a journal has them."""
    skips = [
        Event(
            s.step,
            str(s.verdict),
            {
                "cause": s.cause.name,
                "scale": s.scale,
                "next_scale": s.next_scale,
                "culprits": list(s.culprits),
                "key": s.key,
            },
        )
        for s in assembly.steps
        if s.skipped
    ]
    return [*assembly.events, *skips]


def _together(runs: Sequence[Run]) -> Run:
    """Several logs as one run: one after the other; or beside each other if they are of different
    formats, or have different numbers, as when each metric has a file of its own."""
    runs = [run for run in runs if run.steps or run.events] or list(runs)
    run, *others = runs
    for other in others:
        alike = set(run.header["formats"]) & set(other.header["formats"])
        run = (_after if alike and _known(run) & _known(other) else _beside)(run, other)
    return run


def _known(run: Run) -> set[str]:
    """Which numbers a log has; of one that has none, such as a list of overflows, all."""
    has = {n for n in _NUMBERS if any(getattr(s, n) == getattr(s, n) for s in run.steps)}
    return has or set(_NUMBERS)


def _after(run: Run, other: Run) -> Run:
    events = [*run.events]
    if run.steps and other.steps:
        last, first = run.steps[-1], other.steps[0]
        if first.step <= last.step:
            text = f"the next file begins at step {first.step}, this one ended at {last.step}"
            events.append(Event(first.step, "resume", {"text": text, "scale": last.next_scale}))
    return Run(_added(run, other), [*run.steps, *other.steps], events=events + other.events)


def _beside(run: Run, other: Run) -> Run:
    """Two logs of the same steps: what one does not know is taken from the other."""
    steps = list(run.steps)
    at = {s.step: i for i, s in enumerate(steps)}
    for s in other.steps:
        if s.step in at:
            steps[at[s.step]] = _filled(steps[at[s.step]], s)
        else:
            steps.append(s)
    steps.sort(key=lambda s: s.step)
    return Run(_added(run, other), steps, events=run.events + other.events)


def _filled(step: Step, more: Step) -> Step:
    new = {n: getattr(more, n) for n in _NUMBERS if getattr(step, n) != getattr(step, n)}
    if step.cause is Cause.NONE and more.cause is not Cause.NONE:
        new |= {"cause": more.cause, "verdict": more.verdict, "nonfinite": more.nonfinite}
    return step._replace(**new)


def _added(run: Run, other: Run) -> dict[str, Any]:
    mine, theirs = run.header, other.header
    added = {n: mine[n] + theirs[n] for n in ("lines", "guessed", "repeated", "left_out")}
    lists = {n: list(dict.fromkeys(mine[n] + theirs[n])) for n in ("formats", "cannot_know")}
    added["hysteresis"] = mine["hysteresis"] + theirs["hysteresis"]
    return {**mine, **added, **lists, "quiet": mine["quiet"] and theirs["quiet"]}
