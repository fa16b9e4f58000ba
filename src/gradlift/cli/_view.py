"""The state that `gradlift watch` shows, updated from the lines appended to a journal."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

from ..analysis.diagnosis import Finding, diagnose
from ..errors import JournalError, JournalWarning, LogError
from ..formats import FP16
from ..journal import Run, Sample, Step
from ..journal.reader import add_lines, check_head, is_journal, journal_at, open_journal
from ..journal.validation import Distinct
from ..logs import LogReader, read_log, read_run, sizes, whole_file

_BLOCK = 2**22  # bytes parsed at a time, so that a long journal is never in memory as a whole
_RECENT = 50  # steps that throughput is taken over
_SHOWN = 5  # rows of the short tables
_LONGEST = 2**27  # bytes of a journal that is read as a whole for its findings
_SHARE = 0.1  # of the time that may go into looking for findings


class Lane(NamedTuple):
    """The latest state of one key. Most runs have one lane, with an empty key."""

    key: str
    last: Step
    steps: int
    skipped: int
    trail: tuple[float, ...]
    """log2 of the scale over the whole run."""


class Frame(NamedTuple):
    """Everything that `gradlift watch` shows at one time."""

    header: dict[str, Any]
    lanes: list[Lane]
    causes: dict[str, int]
    """Why steps were skipped, the most frequent first."""
    retries: int
    culprits: list[tuple[str, int]]
    worst: list[tuple[str, float, float]]
    """Name, share flushed and share subnormal of the worst parameters, of the last sample."""
    sampled: int | None
    rate: float
    """Steps a second, over the last steps."""
    age: float
    """Seconds since the last line."""
    resumes: int
    damaged: int

    @property
    def stands_still(self) -> bool:
        """Has there been no line for far longer than a step takes?"""
        return self.age > max(10.0, 20 / self.rate if self.rate > 0 else 60.0)


class View:
    """Reduces a journal of any length to a small state.

    >>> from gradlift import Verdict
    >>> view = View()
    >>> view.add(Run(steps=[Step(0, 8.0, 8.0), Step(1, 8.0, 4.0, verdict=Verdict.SKIP)]))
    >>> [(lane.last.step, lane.skipped) for lane in view.frame(age=0.5).lanes]
    [(1, 1)]
    """

    def __init__(self) -> None:
        self._header: dict[str, Any] = {}
        self._last: dict[str, Step] = {}
        self._trails: dict[str, Trail] = {}
        self._steps: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._culprits: Counter[str] = Counter()
        self._recent: deque[Step] = deque(maxlen=_RECENT)
        self._sample: Sample | None = None
        self._retries = self._resumes = 0
        self.damaged = 0

    def add(self, run: Run) -> None:
        """Adds the lines that were appended."""
        if run.header and self._header:
            self._resumes += 1
        self._header = self._header or run.header
        self._resumes += sum(event.what == "resume" for event in run.events)
        for step in run.steps:
            self._add(step)
        if run.samples:
            self._sample = run.samples[-1]

    def _add(self, step: Step) -> None:
        self._last[step.key] = step
        self._trails.setdefault(step.key, Trail()).add(step.scale)
        self._steps[step.key] += 1
        self._retries += step.retries
        if step.seconds == step.seconds:
            self._recent.append(step)
        if step.skipped:
            self._skipped[step.key] += 1
            self._causes[str(step.cause)] += 1
            self._culprits.update(step.culprits[:1])

    def frame(self, age: float) -> Frame:
        """The present frame, `age` seconds after the last line."""
        lanes = [
            Lane(key, last, self._steps[key], self._skipped[key], self._trails[key].values)
            for key, last in self._last.items()
        ]
        return Frame(
            header=self._header,
            lanes=lanes,
            causes=dict(self._causes.most_common()),
            retries=self._retries,
            culprits=self._culprits.most_common(_SHOWN),
            worst=_worst(self._sample),
            sampled=self._sample.step if self._sample else None,
            rate=self._rate(),
            age=age,
            resumes=self._resumes,
            damaged=self.damaged,
        )

    def _rate(self) -> float:
        seconds = sum(step.seconds for step in self._recent)
        keys = len({step.key for step in self._recent})  # each loss writes a line of its own
        return len(self._recent) / keys / seconds if seconds > 0 else math.nan


class Trail:
    """log2 of a scale over any number of steps, in few values: each the lowest of a range of steps.

    >>> trail = Trail(most=4)
    >>> for scale in (1.0, 2.0, 4.0, 2.0, 8.0):
    ...     trail.add(scale)
    >>> trail.values
    (0.0, 1.0, 3.0)
    """

    def __init__(self, most: int = 80) -> None:
        self._most, self._share, self._in_last = most, 1, 0
        self._values: list[float] = []

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self._values)

    def add(self, scale: float) -> None:
        exponent = math.log2(scale) if 0 < scale < math.inf else math.nan
        if 0 < self._in_last < self._share:
            self._values[-1] = min(self._values[-1], exponent)
            self._in_last += 1
            return
        if len(self._values) == self._most:
            self._values = list(map(min, self._values[::2], self._values[1::2]))
            self._share *= 2
        self._values.append(exponent)
        self._in_last = 1


class Tail:
    """Reads what was appended to a journal, or to somebody's log, since the last call; an
    unfinished line is kept. A log that is no text is read again as a whole when it has changed, and
    not more often than takes a tenth of the time.

    >>> Tail("nowhere").look()
    False
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        pattern: str | None = None,
    ) -> None:
        self.path, self._format, self._pattern = Path(path), format, pattern
        self._not_before = 0.0
        self.of_log = False
        self._begin()

    def _begin(self, file: int | None = None) -> None:
        self.view = View()
        self.changed = math.nan  # the file's time of modification
        self._file, self._at, self._rest = file, 0, b""
        self._distinct = Distinct()
        self._log: LogReader | None = None

    def look(self) -> bool:
        """Reads new lines; False while there is no journal."""
        path = journal_at(self.path)
        try:
            if whole_file(self.path) and (path == self.path or not path.exists()):
                return self._look_at_all()
            log = path.suffix != ".jsonl" and not is_journal(path)
            self.of_log = log = log or bool(self._format or self._pattern)
            with open_journal(path) as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._file or now.st_size < self._at:
                    self._begin(now.st_ino)  # another file by the same name
                self.changed = now.st_mtime
                file.seek(self._at)
                while block := file.read(_BLOCK):
                    if log:
                        self._take_log(block)
                    else:
                        self._take(block, path)
        except JournalError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    @property
    def read(self) -> int:
        """Bytes read so far."""
        return self._at

    def _look_at_all(self) -> bool:
        try:
            size, changed = sizes(self.path)
        except (LogError, OSError):
            return False  # a folder that is still empty, or not there
        begun = time.monotonic()
        if (size, changed) != (self._at, self.changed) and begun >= self._not_before:
            try:
                run = read_log(self.path, format=self._format, pattern=self._pattern)
            except LogError:
                run = Run()  # half written, or nothing that is known yet
            self._begin()
            self.view.add(run)
            self._at, self.changed = size, changed
            self._not_before = time.monotonic() + (time.monotonic() - begun) / _SHARE
        return True

    def _take_log(self, block: bytes) -> None:
        self._at += len(block)
        formats = (self._format,) if self._format else ()
        self._log = self._log or LogReader(formats, self._pattern)
        self._log.feed(block)
        self.view.add(self._log.new())

    def _take(self, block: bytes, path: Path) -> None:
        first = self._at == len(self._rest)  # no line was whole yet
        self._at += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if first:
            check_head(lines[0] if lines else self._rest, path)
        added = Run(path=path)
        self.view.damaged += add_lines(lines, added, self._distinct)
        self.view.add(added)


class FindingsSoFar:
    """The findings of a journal that is still being written: looked for when it has grown, and not
    more often than takes a tenth of the time.

    >>> FindingsSoFar("nowhere").look(0)
    []
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        pattern: str | None = None,
    ) -> None:
        self.path, self._format, self._pattern = Path(path), format, pattern
        self._found: list[Finding] = []
        self._read, self._not_before = 0, 0.0

    def look(self, read: int) -> list[Finding]:
        """The findings, if `read` bytes of the journal are whole lines."""
        now = time.monotonic()
        if read == self._read or read > _LONGEST or now < self._not_before:
            return self._found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JournalWarning)  # its last line may be half written
            try:
                run = read_run(self.path, format=self._format, pattern=self._pattern)
            except LogError:
                return self._found  # no line of a known format yet
            found = diagnose(run)
        self._read = read
        self._found = [f for f in found if f.kind != "killed"]  # it has no ending yet
        self._not_before = time.monotonic() + (time.monotonic() - now) / _SHARE
        return self._found


def _worst(sample: Sample | None) -> list[tuple[str, float, float]]:
    """The parameters of which FP16 loses most, as scaled; zeros count as lost."""
    rows = []
    for name, shares in (sample.parameters if sample else {}).items():
        counts = {int(e): int(n) for e, n in shares.get("exponents", {}).items()}
        lost = FP16.shares(counts, int(shares.get("elements", 0)))
        rows.append((name, lost.flushed + float(shares.get("zero", 0.0)), lost.subnormal))
    return sorted(rows, key=lambda row: (-row[1], -row[2], row[0]))[:_SHOWN]
