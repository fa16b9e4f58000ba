"""The run's record: append-only JSON lines, the only door between training and its observers.

    {"kind":"header","schema":1,"time":...,"versions":{...},"rule":"backoff","parameters":{...}}
    {"kind":"step","step":0,"scale":65536.0,"next_scale":65536.0,"amax":812.0,"norm":0.4,...}
    {"kind":"event","step":7,"what":"skip","cause":"OVERFLOW",...}
    {"kind":"sample","step":100,"parameters":{"head.weight":{...}}}
    {"kind":"probe","step":100,"modules":{"blocks.0":{...}}}

Every line is one `write` to a file opened for appending: a killed process loses at most the line it
was writing. Fields at their default are left out; inf and NaN, which JSON lacks, are strings.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol

from ._version import __version__
from .errors import JournalError, JournalWarning
from .verdict import Cause, Verdict

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = 1
JOURNAL = "journal.jsonl"  # its name in a run's folder
NAN = math.nan
_HEAD = b'{"kind":"header","schema":'
_FRAMEWORKS = ("torch", "jax", "keras", "tensorflow", "numpy", "mxnet")


class Step(NamedTuple):
    """One optimizer step, applied or not.

    >>> Step(3, scale=8.0, next_scale=8.0, amax=2.0).verdict
    <Verdict.APPLY: 'apply'>
    """

    step: int
    scale: float
    """The scale this step's gradients carried."""
    next_scale: float
    amax: float = NAN
    """Largest finite |gradient| as scaled; NaN where it was not taken."""
    nonfinite: bool = False
    loss: float = NAN
    norm: float = NAN
    lr: float = NAN
    verdict: Verdict | None = Verdict.APPLY
    """None only in a replay: the recording cannot tell."""
    cause: Cause = Cause.NONE
    culprits: tuple[str, ...] = ()
    retries: int = 0
    seconds: float = NAN
    near_max_share: float = NAN
    probe_amax: float = NAN
    key: str = ""
    """Which of several losses, each with a scale of its own."""


class Sample(NamedTuple):
    """Statistics of each parameter's gradient at one step."""

    step: int
    parameters: dict[str, dict[str, Any]]


class Probe(NamedTuple):
    """Statistics of the gradients inside the network, by module, at one step."""

    step: int
    modules: dict[str, dict[str, Any]]


class Event(NamedTuple):
    """Something worth telling: a skip, a retry, a halt, a resume, a note.

    >>> Event(7, "skip", {"cause": "OVERFLOW"}).what
    'skip'
    """

    step: int | None
    what: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A recorded (or replayed) run.

    >>> Run(steps=[Step(0, 8.0, 8.0), Step(1, 8.0, 4.0, verdict=Verdict.SKIP)]).skipped
    1
    """

    header: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    path: Path | None = None

    @property
    def skipped(self) -> int:
        """Steps that were not applied."""
        return sum(s.verdict not in (Verdict.APPLY, None) for s in self.steps)

    @property
    def undecided(self) -> int:
        """Steps of a replay of which the recording could not tell the outcome."""
        return sum(s.verdict is None for s in self.steps)


class Sink(Protocol):
    """Who else is told of every line: `gradlift.integrations` has some, such as TensorBoard."""

    def header(self, facts: dict[str, Any]) -> None: ...
    def step(self, step: Step) -> None: ...
    def event(self, event: Event) -> None: ...
    def sample(self, sample: Sample) -> None: ...
    def close(self) -> None: ...


class Journal:
    """Writes a run to `path`, one line a step. An existing journal is continued.

    `describe` the run before its first line; what is not described is simply not known. `also`
    tells every line to other sinks; one that fails is dropped with a warning, and training goes on.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> with Journal(path) as journal:
    ...     journal.describe(rule="static:8", parameters={"w": 4})
    ...     journal.step(Step(0, scale=8.0, next_scale=8.0, amax=2.0, loss=0.25))
    >>> read_journal(path).steps[0].loss
    0.25
    """

    def __init__(self, path: str | os.PathLike[str], *, also: Sequence[Sink] = ()) -> None:
        self.path = Path(path)
        self._also = list(also)
        self._process = os.getpid()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self._check_existing()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (closed by close())
        if cut_off:
            self._file.write(b"\n")  # keeps the damaged line apart from what follows
        self._header: dict[str, Any] | None = {
            "kind": "header",
            "schema": SCHEMA,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _check_existing(self) -> bool:
        """Refuses a file that is not a journal; True if its last line is cut off."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return False
        with open(self.path, "rb") as file:
            check_head(file.readline(), self.path)
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

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
        """Records an event, with whatever tells more about it."""
        _check_names(detail, "kind")
        line = {"kind": "event", "step": step, "what": what, **detail}
        self._write(line, Event(step, what, detail))

    def sample(self, step: int, parameters: dict[str, dict[str, Any]]) -> None:
        """Records statistics by parameter."""
        line = {"kind": "sample", "step": step, "parameters": parameters}
        self._write(line, Sample(step, parameters))

    def probe(self, step: int, modules: dict[str, dict[str, Any]]) -> None:
        """Records what was seen between modules."""
        line = {"kind": "probe", "step": step, "modules": modules}
        self._write(line, Probe(step, modules))

    def _write(self, line: dict[str, Any], told: Step | Event | Sample | Probe) -> None:
        if os.getpid() != self._process:
            return  # a forked child trains for itself: its steps are not this run's
        header = self._header
        if header is not None:
            _claim(self._file, self.path)
            header["versions"] = {"python": platform.python_version(), "gradlift": __version__} | {
                name: str(sys.modules[name].__version__)
                for name in _FRAMEWORKS
                if hasattr(sys.modules.get(name), "__version__")
            }
            self._file.write(_line(header))
            self._header = None  # only now: what could not be written is still to be written
        self._file.write(_line(line))
        if header is not None:
            self._tell("header", header)
        if not isinstance(told, Probe):  # sinks draw parameters, not modules
            self._tell(line["kind"], told)

    def _tell(self, what: str, *told: Any) -> None:
        for sink in tuple(self._also):
            try:
                getattr(sink, what)(*told)
            except Exception as error:
                self._also = [other for other in self._also if other is not sink]
                name, kind = type(sink).__name__, type(error).__name__
                warnings.warn(f"{name} is told no more of this run: {kind}: {error}", stacklevel=4)

    def close(self) -> None:
        """Closes the file. A journal that was never closed is complete all the same."""
        self._file.close()
        self._tell("close")
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
    """The journal that is meant.

    >>> opened(None) is None
    True
    """
    return Journal(given) if isinstance(given, (str, os.PathLike)) else given


def _claim(file: IO[bytes], path: Path) -> None:
    """A second process is refused at its first line: two ranks with one path, mostly. No more than
    that: the claim ends with the process, or when it has opened the file again and closed it."""
    if fcntl is None or not path.is_file():  # /dev/null is everybody's
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise JournalError(
            f"{path} is being written by another process, and their lines would mix. If these are "
            "two ranks of one job, record on rank 0 alone, or give each rank a file of its own"
        ) from None
    except OSError:
        pass  # a file system without locks


def read_journal(path: str | os.PathLike[str]) -> Run:
    """Reads a run, of a journal or of the folder it is in. One that was cut off gives what is
    whole, with one warning.

    Raises JournalError for what is not a journal and for a later schema.

    >>> read_journal("nowhere.jsonl")
    Traceback (most recent call last):
        ...
    gradlift.errors.JournalError: cannot read nowhere.jsonl: No such file or directory
    """
    path = Path(path)
    if path.is_dir():
        path = path / JOURNAL
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from error
    if not data:
        _warn(f"{path} is empty: a run without a single line")
        return Run(path=path)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line end
    check_head(lines[0], path)
    run = Run(path=path)
    damaged = add_lines(lines, run)
    if damaged:
        _warn(
            f"{path}: {damaged} damaged or cut-off line{'s' * (damaged > 1)} left out, "
            f"{len(run.steps)} steps read"
        )
    return run


def add_lines(lines: list[bytes], run: Run) -> int:
    """Adds lines of a journal to `run`; returns how many were damaged, and so left out."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage: looking for some among millions takes a quarter longer
    try:
        return sum(line is None or not _take(line, run) for line in _parsed(lines))
    finally:
        if collecting:
            gc.enable()


def _parsed(lines: list[bytes]) -> Iterator[Any]:
    """Each line's value, None for a damaged one. Parsed a block at a time: twice as fast."""
    for start in range(0, len(lines), 4096):
        block = lines[start : start + 4096]
        try:
            values = json.loads(b"[" + b",".join(block) + b"]")
            if len(values) == len(block):
                yield from values
                continue
        except ValueError:
            pass
        for line in block:
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _take(line: Any, run: Run) -> bool:
    """Puts one line where it belongs; False if it makes no sense. Unknown kinds are passed over."""
    try:
        kind = line["kind"]
        if kind == "step":
            run.steps.append(_step(line))
        elif kind == "event":
            detail = {k: v for k, v in line.items() if k not in ("kind", "step", "what")}
            run.events.append(Event(line["step"], str(line["what"]), detail))
        elif kind == "sample":
            run.samples.append(Sample(int(line["step"]), dict(line["parameters"])))
        elif kind == "probe":
            run.probes.append(Probe(int(line["step"]), dict(line["modules"])))
        elif kind == "header":
            _check_schema(line["schema"], run.path)
            if run.header:  # the journal was continued by a later process
                last = run.steps[-1].step if run.steps else None
                run.events.append(Event(last, "resume", line))
            else:
                run.header.update(line)
    except JournalError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False
    return True


def _step(line: dict[str, Any]) -> Step:
    get = line.get
    step = line["step"]
    if type(step) is not int:
        raise TypeError
    verdict = get("verdict")
    cause = get("cause")
    return Step(
        step,
        _number(line["scale"]),
        _number(line["next_scale"]),
        _number(get("amax", NAN)),
        bool(get("nonfinite", False)),
        _number(get("loss", NAN)),
        _number(get("norm", NAN)),
        _number(get("lr", NAN)),
        Verdict.APPLY if verdict is None else None if verdict == "None" else Verdict(verdict),
        Cause.NONE if cause is None else Cause[cause],
        tuple(map(str, get("culprits", ()))),
        int(get("retries", 0)),
        _number(get("seconds", NAN)),
        _number(get("near_max_share", NAN)),
        _number(get("probe_amax", NAN)),
        str(get("key", "")),
    )


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int or value in ("inf", "-inf", "nan"):
        return float(value)
    raise TypeError


def check_head(line: bytes, path: Path) -> None:
    """The file must start like a journal; a header that is cut off counts as one."""
    if not (line.startswith(_HEAD) or (_HEAD.startswith(line) and line)):
        raise JournalError(f"{path} is not a gradlift journal: its first line is no header")
    number, comma, _ = line[len(_HEAD) :].rstrip(b"}\n").partition(b",")
    if comma or line.rstrip(b"\n").endswith(b"}"):
        _check_schema(int(number) if number.isdigit() else None, path)


def _check_schema(schema: Any, path: Path | None) -> None:
    if type(schema) is not int:
        raise JournalError(f"{path} is not a gradlift journal: its schema is {schema!r}")
    if schema > SCHEMA:
        raise JournalError(
            f"{path} was written by a later gradlift (schema {schema}, this one reads {SCHEMA}): "
            "upgrade gradlift to read it"
        )


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
            raise JournalError(f"{name!r} is the journal's own word: call that fact something else")


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


def _warn(message: str) -> None:
    warnings.warn(message, JournalWarning, stacklevel=3)


_STEP_DEFAULTS = tuple(Step._field_defaults.get(name, object()) for name in Step._fields)
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode
