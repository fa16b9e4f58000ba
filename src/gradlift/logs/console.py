"""A console's output: which line is whose, progress bars, messages cut in two, the traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..errors import LogError
from ..journal import Event
from ..text import visible
from . import deepspeed, fairseq, megatron, trainers
from .assembly import Assembly
from .formats import LineFormat, Reader
from .numbers import I, number, whole
from .row import Row

LINE_FORMATS: tuple[LineFormat, ...] = (
    *deepspeed.FORMATS,
    *megatron.FORMATS,
    *fairseq.FORMATS,
    *trainers.FORMATS,
)
_BAR = re.compile(
    r"(?:(?P<label>[^\W\d][^%|]{0,60}):\s{0,9})?(?:\d{1,3}%\|[^|]*\| *)?"
    rf"(?P<done>{I})/(?P<all>{I}) \["
)
_BLANKS = re.compile(r" {2,}")
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200}?)(?:: (?P<message>.*))?$")
_LIBRARY = ("site-packages", "dist-packages", "/lib/python3", "<frozen", "torch/distributed/")
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException", "RayTaskError")
_LONGEST_TRACE = 1000  # lines
_MOST_BARS = 100
_FRAMES = 5
_LONGEST = 500  # characters of a message


class Console:
    """Lines in, rows out to an `Assembly`; formats may be mixed.

    >>> console = Console(LINE_FORMATS)
    >>> console.feed(["iter 0: loss 4.2519, time 97.01ms", "nothing", "iter 1: loss nan, time 9ms"])
    >>> console.end()
    >>> [(s.step, s.loss, str(s.cause)) for s in console.assembly.steps]
    [(0, 4.2519, 'none'), (1, nan, 'loss non-finite')]
    """

    def __init__(self, formats: Iterable[LineFormat]) -> None:
        self.assembly = Assembly()
        self.found: dict[str, int] = {}
        """Formats, and how many of their lines there were."""
        self.lines = 0
        self._readers: list[tuple[str, Reader]] = []
        self._wraps: list[str] = []
        for each in formats:
            self._readers += each.readers.items()
            self._wraps += each.wraps
        self._at: int | None = None
        self._of = self._passed = 0
        self._left: tuple[int, int, int] | None = None  # the bar before that of `_of`
        self._others: set[int] = set()  # totals of bars that are not the training's
        self._epoch = self._epochs_before = 0
        self._cut = ""  # the beginning of a message that a terminal may have cut
        self._trace: _Trace | None = None
        self._ending: dict[str, Any] | None = None

    def feed(self, lines: list[str]) -> None:
        """Reads lines in their order."""
        text = "\n".join(lines)
        readers = [(piece, read) for piece, read in self._readers if piece in text]
        bars = "it/s" in text or "s/it" in text
        traces = _TRACEBACK in text
        wraps = [piece for piece in self._wraps if piece in text]
        if not (readers or bars or traces or wraps or self._trace or self._cut):
            self.lines += len(lines)
            return
        for line in lines:
            self.lines += 1
            if bars and ("it/s" in line or "s/it" in line):
                self._progress(line)
            if self._trace is not None:
                self._follow(line)
            if traces and _TRACEBACK in line:
                self._trace = _Trace(line[: line.index(_TRACEBACK)])
            tried = readers
            if self._cut:
                line, self._cut, tried = self._joined(line), "", self._readers
            known = self._read(line, tried)
            if wraps and not known and any(piece in line for piece in wraps):
                blanks = _BLANKS.sub("", line)  # or the message was cut, and the rest put behind
                if blanks == line or not self._read(blanks, self._readers):
                    self._cut = line[-500:]

    def end(self) -> None:
        """No line will follow."""
        self.assembly.end()
        if self._trace is not None and self._ending is None:
            self._ending = self._trace.facts()
        if self._ending is not None:
            last = self.assembly.steps[-1].step if self.assembly.steps else None
            self.assembly.events.append(Event(last, "end", self._ending))

    def take(self, row: Row) -> None:
        """A row of the line that was read last."""
        if row.sign is not None:
            self.found[row.format] = self.found.get(row.format, 0) + row.sign
            return
        at = self._at
        if row.in_epochs:
            if row.step is not None:
                self._begin_epoch(row.step)
                return
            at = self._epochs_before + self._epoch or None
        self.found[row.format] = self.found.get(row.format, 0) + 1
        self.assembly.add(row, self.lines, at)
        if row.loss is not None or row.step is not None:
            self._ending = None  # the run went on after that exception

    def _read(self, line: str, readers: list[tuple[str, Reader]]) -> bool:
        """Takes the rows of a line; False if there is none."""
        known = False
        for piece, read in readers:
            if piece in line:
                for row in read(line):
                    known = True
                    self.take(row)
        return known

    def _begin_epoch(self, epoch: int) -> None:
        """A number that does not rise is that of another call of `fit`."""
        if epoch <= self._epoch:
            self._epochs_before += self._epoch
        self._epoch = epoch

    def _progress(self, line: str) -> None:
        """The bar of the training itself has no label; one that is full is followed by the next
        epoch's. The larger one is taken, unless the smaller one goes on after it."""
        for found in _BAR.finditer(line):
            done, of = int(found["done"]), int(found["all"])
            if found["label"] or of in self._others:
                continue
            if of < self._of:
                if self._left is None or of != self._left[0] or done <= self._left[1]:
                    continue
                if len(self._others) < _MOST_BARS:
                    self._others.add(self._of)
                self._of, self._at, self._passed = of, *self._left[1:]
            elif of > self._of and self._at is not None:
                self._left = self._of, self._at - self._passed, self._passed
            if self._at is not None and of == self._of and done < self._at - self._passed == of:
                self._passed += of
            self._of, self._at = of, self._passed + done

    def _joined(self, line: str) -> str:
        """A message that was cut in two, without the blanks that the terminal put in."""
        both = self._cut + line.strip()
        return _BLANKS.sub("", both)

    def _follow(self, line: str) -> None:
        trace = self._trace
        assert trace is not None
        if not trace.take(line):
            return
        self._trace = None
        facts = trace.facts()
        launcher = facts["type"].rpartition(".")[2] in _LAUNCHERS
        if not (launcher and self._ending is not None):
            self._ending = facts


class _Trace:
    """A traceback, line by line, until the exception itself."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.rstrip()
        self._frames: list[list[str]] = []
        self._left = _LONGEST_TRACE
        self._type = self._message = ""

    def take(self, line: str) -> bool:
        """Is the traceback over?"""
        self._left -= 1
        if self._prefix:
            if not line.startswith(self._prefix):
                return self._left <= 0  # another rank's
            line = line[len(self._prefix) :]
            line = line.removeprefix(" ") if not line.startswith("  ") else line
        frame = _FRAME.match(line)
        if frame:
            file = frame["file"].replace("\\", "/")
            self._frames.append([f"{file}:{frame['line']}", frame["function"].strip(), ""])
        elif line.startswith(" ") or not line.strip():
            source = line.strip()
            if self._frames and source and not self._frames[-1][2] and set(source) - set("^~ "):
                self._frames[-1][2] = source
        elif (raised := _RAISED.match(line.strip())) and self._frames:
            self._type, self._message = raised["type"], raised["message"] or ""
            return True
        return self._left <= 0

    def facts(self) -> dict[str, Any]:
        """The details of an "end" event."""
        own = [f for f in self._frames if not any(part in f[0] for part in _LIBRARY)]
        frames = [[visible(text) for text in frame] for frame in (own or self._frames)[-_FRAMES:]]
        for frame in frames:
            frame[0] = frame[0].rpartition("/")[2]
        return {
            "how": "exception",
            "type": visible(self._type or "an exception").rpartition(".")[2],
            "message": visible(self._message[:_LONGEST]),
            "frames": frames,
        }


def of_pattern(pattern: str) -> LineFormat:
    r"""A format by the user's own expression, whose groups are named like the fields of a `Row`.

    >>> read = of_pattern(r"step (?P<step>\d+).*loss (?P<loss>\S+)").readers[""]
    >>> [(row.step, row.loss) for row in read("step 3: loss 2.5")]
    [(3, 2.5)]
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise LogError(f"--pattern is no regular expression: {error}") from error
    fields = {"step", "loss", "norm", "lr", "scale", "next_scale", "skipped", "skips_in_all"}
    groups = set(expression.groupindex)
    if not groups & fields or groups - fields:
        raise LogError(
            f"--pattern names the groups {', '.join(sorted(groups)) or '(none)'}; expected are "
            f"some of {', '.join(sorted(fields))}, such as (?P<loss>\\S+)"
        )
    return LineFormat("pattern", "any", tuple(sorted(groups)), (), {"": _reader(expression)})


def _reader(expression: re.Pattern[str]) -> Reader:
    def read(line: str) -> Iterable[Row]:
        found = expression.search(line)
        if found is None:
            return
        facts = found.groupdict()
        yield Row(
            "pattern",
            step=whole(facts.get("step")),
            loss=number(facts.get("loss")),
            norm=number(facts.get("norm")),
            lr=number(facts.get("lr")),
            scale=number(facts.get("scale")),
            next_scale=number(facts.get("next_scale")),
            skipped=facts.get("skipped") is not None,
            skips_in_all=whole(facts.get("skips_in_all")),
        )

    return read
