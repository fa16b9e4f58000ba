"""Writes a journal: append-only JSON lines. Reports and commands read nothing else.

    {"kind":"header","schema":1,"time":...,"versions":{...},"rule":"backoff","parameters":{...}}
    {"kind":"step","step":0,"scale":65536.0,"next_scale":65536.0,"amax":812.0,"norm":0.4,...}
    {"kind":"event","step":7,"what":"skip","cause":"OVERFLOW",...}
    {"kind":"sample","step":100,"parameters":{"head.weight":{...}}}
    {"kind":"probe","step":100,"modules":{"blocks.0":{...}}}

Every line is one `write` to a file opened for appending: a killed process loses at most the line it
was writing. A line outlives the process; to outlive the machine's power it needs `fsync=True`.
Fields at their default are left out; inf and NaN, which JSON lacks, are strings.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from .._version import __version__
from ..errors import JournalError, JournalWarning, warn
from .reader import SCHEMA, check_head
from .records import Calls, Event, Probe, Sample, Step

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_FRAMEWORKS = ("torch", "jax", "keras", "tensorflow", "numpy", "mxnet")
_BACKLOG = 4 * 2**20  # bytes kept while a file cannot be written
_PAUSE = 1.0  # seconds between two attempts at such a file, and between two looks at its place
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # there may be room later, in the same file


class Sink(Protocol):
    """An object that gets every record too; `gradlift.integrations` has TensorBoard and others."""

    def header(self, facts: dict[str, Any]) -> None: ...
    def step(self, step: Step) -> None: ...
    def event(self, event: Event) -> None: ...
    def sample(self, sample: Sample) -> None: ...
    def close(self) -> None: ...


class Journal:
    """Writes a run to `path`, one line a step. An existing journal is continued.
    docs/journal.md says what it does on a full disk, beside another process, after a kill.

    `describe` adds facts to the header, before the first line. The sinks in `also` get every
    record too; a sink that fails is dropped with a warning, and training goes on. `fsync` waits
    after each line until the disk has it: for journals that must survive a power failure, at the
    price of one write to the disk a step.

    >>> import tempfile, os
    >>> from gradlift import read_journal
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> with Journal(path) as journal:
    ...     journal.describe(rule="static:8", parameters={"w": 4})
    ...     journal.step(Step(0, scale=8.0, next_scale=8.0, amax=2.0, loss=0.25))
    >>> read_journal(path).steps[0].loss
    0.25
    """

    def __init__(
        self, path: str | os.PathLike[str], *, also: Sequence[Sink] = (), fsync: bool = False
    ) -> None:
        self.path = Path(path)
        self._also = list(also)
        self._process = os.getpid()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head, torn = self._check_existing()
        self._lines = _Lines(self.path, head=head, torn=torn, fsync=fsync)
        # A scaler with a path is seldom closed by hand: the file is also closed when the journal is
        # garbage-collected, and at the end of the process.
        self._close_lines = weakref.finalize(self, _close_own, self._lines, self._process)
        self._header: dict[str, Any] | None = {
            "kind": "header",
            "schema": SCHEMA,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _check_existing(self) -> tuple[bytes, bool]:
        """Refuses a file that is not a journal; its first line, and whether its last is cut off."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return b"", False
        with open(self.path, "rb") as file:
            head = file.readline()
            check_head(head, self.path)
            file.seek(-1, os.SEEK_END)
            return head, file.read(1) != b"\n"

    def describe(self, **facts: Any) -> None:
        """Adds facts to the header: rule, formats, world_size, parameters (name -> size)."""
        _check_names(facts, "kind", "schema", "time", "versions")
        if self._header is None:
            self.event("note", **facts)
        else:
            self._header.update(facts)

    def step(self, step: Step) -> None:
        """Records one step."""
        line: dict[str, Any] = {"kind": "step"}
        for name, value, default in zip(Step._fields, step, _STEP_DEFAULTS, strict=True):
            if value is not default and value == value and value != default:  # NaN is left out
                line[name] = value
        if "verdict" in line:
            line["verdict"] = str(step.verdict)
        if "cause" in line:
            line["cause"] = step.cause.name
        self._write(line, step)

    def event(self, what: str, step: int | None = None, **detail: Any) -> None:
        """Records an event with its details."""
        _check_names(detail, "kind")
        line = {"kind": "event", "step": step, "what": what, **detail}
        self._write(line, Event(step, what, detail))

    def sample(self, step: int, parameters: dict[str, dict[str, Any]]) -> None:
        """Records statistics by parameter."""
        line = {"kind": "sample", "step": step, "parameters": parameters}
        self._write(line, Sample(step, parameters))

    def probe(self, step: int, modules: dict[str, dict[str, Any]]) -> None:
        """Records statistics by module."""
        line = {"kind": "probe", "step": step, "modules": modules}
        self._write(line, Probe(step, modules))

    def forward(self, step: int, modules: dict[str, dict[str, Any]]) -> None:
        """Records what modules returned in the forward pass."""
        line = {"kind": "forward", "step": step, "modules": modules}
        self._write(line, Probe(step, modules))

    def weights(self, step: int, parameters: dict[str, dict[str, Any]]) -> None:
        """Records statistics of weights and their update."""
        line = {"kind": "weights", "step": step, "parameters": parameters}
        self._write(line, Probe(step, parameters))

    def calls(self, calls: Calls) -> None:
        """Records an order of calls."""
        line = {"kind": "calls", "step": calls.step, "order": calls.order, "count": calls.times}
        self._write(line, calls)

    def _write(self, line: dict[str, Any], record: Step | Event | Sample | Probe | Calls) -> None:
        if os.getpid() != self._process:
            return  # the steps of a forked child are no part of this run
        header = self._header
        if header is not None:
            self._lines.claim()
            header["versions"] = {"python": platform.python_version(), "gradlift": __version__} | {
                name: str(sys.modules[name].__version__)
                for name in _FRAMEWORKS
                if hasattr(sys.modules.get(name), "__version__")
            }
            encoded = _line(header)
            self._header = None
            self._lines.write(encoded)
        self._lines.write(_line(line))
        if not self._also:
            return
        if header is not None:
            self._send("header", header)
        if not isinstance(record, (Probe, Calls)):  # sinks draw gradients, steps and events
            self._send(line["kind"], record)

    def _send(self, what: str, *given: Any) -> None:
        for sink in tuple(self._also):
            try:
                getattr(sink, what)(*given)
            except Exception as error:
                self._also = [other for other in self._also if other is not sink]
                name, kind = type(sink).__name__, type(error).__name__
                warn(f"{name} gets no more records of this run: {kind}: {error}")

    def close(self) -> None:
        """Closes the file. A journal that was never closed is complete as well."""
        self._close_lines()
        self._send("close")
        self._also = []

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


JournalLike = Journal | str | os.PathLike[str]
"""A journal, or the path of one."""


def opened(given: JournalLike | None) -> Journal | None:
    """The journal at a path; a journal as it is.

    >>> opened(None) is None
    True
    """
    return Journal(given) if isinstance(given, (str, os.PathLike)) else given


class _Lines:
    """A file of whole lines. A line that cannot be written is kept, up to a bound, and retried.

    After a short write the file is truncated. Where that fails too, the next line begins with a
    line end, so that only one line is damaged. A file that was removed, or whose file system went
    away, is opened again at its path. The number of lost lines is recorded in the file.
    """

    def __init__(self, path: Path, *, head: bytes, torn: bool, fsync: bool = False) -> None:
        self.path, self.fsync = path, fsync
        self.file = self._open()
        self.device = os.stat(path.parent).st_dev  # the file system
        self.head = head  # the file's first line, by which it is known again
        self.torn = torn  # the file ends in the middle of a line
        self.start, self.ends = self._size(), 0  # line ends written behind `start`
        self.waiting: deque[bytes] = deque()
        self.size = self.dropped = 0
        self.gone = False  # this file is no longer the one at the path, or takes no writes
        self.again_at = -math.inf
        self.trouble, self.warned = "", False
        self.end: int | None = None  # of the file, where its system has no locks

    def _open(self) -> Any:
        """For appending; a file is readable too, so that it can be copied once it was removed."""
        self.is_file = self.path.is_file() or not self.path.exists()  # else a pipe, or /dev/null
        return open(self.path, "a+b" if self.is_file else "ab", buffering=0)

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def claim(self) -> None:
        """Refuses a second process at its first line, such as a second rank with the same path. The
        lock ends with the process, and when the process opens the file again and closes it."""
        if not self._locked():
            raise JournalError(
                f"{self.path} is being written by another process, and their lines would mix. If "
                "these are two ranks of one job, record on rank 0 alone, or give each rank a file "
                "of its own"
            )

    def _locked(self) -> bool:
        """Takes the lock, or keeps it; False if another process has it."""
        if fcntl is None or not self.is_file:  # /dev/null may be shared
            return True
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            self.end = self._size() if self.end is None else self.end
        return True

    def write(self, line: bytes) -> None:
        """Writes a line, or keeps it if it or an earlier one cannot be written."""
        if not self.head:
            self.head = line
        if time.monotonic() >= self.again_at:
            self._catch_up()
        if self.gone or self.waiting or not self._put(line):
            if self.size + len(line) > _BACKLOG:
                self.dropped += 1
            else:
                self.waiting.append(line)
                self.size += len(line)
        if self.trouble and not self.warned:
            self._warn()

    def _catch_up(self) -> None:
        self.again_at = time.monotonic() + _PAUSE
        if not self._present():
            return
        while self.waiting:
            if not self._put(self.waiting[0]):
                return
            self.size -= len(self.waiting.popleft())
        if self.dropped:
            text = f"{self.dropped} lines could not be written and were dropped"
            note = {"code": "lines-dropped", "dropped": self.dropped, "text": text}
            if self._put(_line({"kind": "event", "step": None, "what": "note", **note})):
                self.dropped = 0

    def _present(self) -> bool:
        """Is the file at its path, ready and locked? Else it is opened again, or made again from
        what is left of it. Folders are not made again: who removes one may mean it."""
        if not (self.gone or self._was_removed()):
            self._locked()  # this process may have read the file and closed it
            return True
        self.gone = True
        try:
            if not self.path.exists() and os.stat(self.path.parent).st_dev != self.device:
                raise OSError("its file system is not there")
            again = self._open()
        except OSError as error:
            return self._failed(error)
        try:
            again.seek(0)
            found = again.read()
            if not found:
                found = self._left()
                if again.write(found) != len(found):
                    again.truncate(0)
                    raise OSError("it could not be made again")
            if not found.startswith(self.head):
                raise OSError("another file is in its place")
        except OSError as error:
            again.close()
            return self._failed(error)
        self.file.close()
        self.file = again
        self.dropped += max(0, self.ends - found.count(b"\n", self.start))
        self.start, self.ends = len(found), 0
        self.torn = not found.endswith(b"\n")
        self.gone = not self._locked()
        return not self.gone

    def _was_removed(self) -> bool:
        try:
            if not self.is_file or os.fstat(self.file.fileno()).st_nlink:
                return False
            self.trouble = self.trouble or "it was removed"
        except OSError as error:
            self._failed(error)
        return True

    def _left(self) -> bytes:
        """What the file held, or its first line if that cannot be read."""
        try:
            self.file.seek(0)
            return self.file.read() or self.head
        except OSError:
            return self.head

    def _put(self, line: bytes) -> bool:
        """Writes a whole line or nothing; returns whether it was written."""
        data = b"\n" + line if self.torn else line
        if self.end is not None:
            self._look_for_others()
        try:
            written = self.file.write(data) or 0
        except OSError as error:
            self.gone = error.errno not in _FULL and self.is_file
            return self._failed(error)
        if written == len(data):
            self.ends += 1 + self.torn
            self.torn = False
            if self.end is not None:
                self.end = self._size()
            if self.fsync:
                self._sync()
            return True
        try:
            self.file.truncate(self._size() - written)
        except OSError:  # a pipe, or a file system that cannot
            if written:
                self.torn = data[written - 1 : written] != b"\n"
            if written == len(data) - 1:
                return True  # all but the line end, with which the next line begins
        return self._failed(OSError(f"{written} of {len(data)} bytes were written"))

    def _look_for_others(self) -> None:
        """Without locks a second process shows by its lines only."""
        if self._size() != self.end:
            self.end = None
            warn(
                f"{self.path} holds lines of another process among this one's: its file system "
                "has no locks, so the second writer could not be refused. Record on rank 0 alone, "
                "or give each rank a file of its own",
                JournalWarning,
            )

    def _sync(self) -> None:
        try:
            os.fsync(self.file.fileno())
        except OSError as error:  # the line is in the file, if not on the disk
            self.trouble = self.trouble or f"fsync: {error.strerror}"

    def _failed(self, error: OSError) -> bool:
        self.again_at = time.monotonic() + _PAUSE
        self.trouble = self.trouble or error.strerror or str(error)
        return False

    def _warn(self) -> None:
        """Once for each file, and after the line was kept: a warning may be raised as an error."""
        self.warned = True
        warn(
            f"{self.path} cannot be written at present: {self.trouble}. Training goes on; "
            f"up to {_BACKLOG // 2**20} MiB of lines are kept and written as soon as possible",
            JournalWarning,
        )

    def close(self) -> None:
        if self.file.closed:
            return
        if self.waiting or self.dropped:
            self._catch_up()
        self.file.close()
        lost = len(self.waiting) + self.dropped
        if lost:
            warn(f"{self.path} lacks its last {lost} lines: {self.trouble}", JournalWarning)


def _close_own(lines: _Lines, process: int) -> None:
    if os.getpid() == process:  # lines kept in a forked child are written by its parent
        lines.close()


def _line(content: dict[str, Any]) -> bytes:
    try:
        text = _encode(content)
    except ValueError:  # inf or NaN somewhere: JSON has neither
        text = _encode(_named_nonfinite(content))
    except TypeError as error:
        raise JournalError(f"cannot be written as JSON: {error}") from error
    return text.encode() + b"\n"


def _check_names(facts: dict[str, Any], *reserved: str) -> None:
    for name in reserved:
        if name in facts:
            raise JournalError(
                f"{name!r} is a reserved name of the journal: use another name for this fact"
            )


def _named_nonfinite(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _named_nonfinite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named_nonfinite(v) for v in value]
    return value


def _plain(value: Any) -> Any:
    """Scalars of array libraries as Python numbers, everything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


_STEP_DEFAULTS = tuple(Step._field_defaults.get(name, object()) for name in Step._fields)
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode
