"""A run's folder: gradlift-runs/<script>-<time>/ with journal.jsonl, report.html, command.json."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from .._version import __version__
from ..errors import GradliftError
from ..journal import JOURNAL

REPORT = "report.html"
COMMAND = "command.json"
_WAIT = 20.0  # seconds that other ranks wait to learn where rank 0 records


def make(stem: str, runs: Path, name: str | None, command: Sequence[str]) -> Path:
    """A new folder; a number is added to its name if there is one already.

    >>> import tempfile
    >>> runs = Path(tempfile.mkdtemp())
    >>> make("train", runs, "first", ["train.py"]).name, make("train", runs, "first", []).name
    ('first', 'first-2')
    """
    wanted = name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not _is_plain(wanted):
        raise GradliftError(f"the name {wanted!r} is no plain folder name")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = _new(runs, wanted)
    except OSError as error:
        raise GradliftError(f"cannot make {runs / wanted}: {error.strerror}") from error
    facts = {
        "command": list(command),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "directory": os.getcwd(),
        "versions": {"python": platform.python_version(), "gradlift": __version__},
        "platform": platform.platform(),
        "executable": sys.executable,
    }
    (folder / COMMAND).write_text(json.dumps(facts, indent=1))
    return folder


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name not in ("", ".", "..")


def _new(runs: Path, wanted: str) -> Path:
    """Made by one call that fails if there is anything by that name: two runs never share one."""
    for n in count(1):
        folder = runs / (wanted if n == 1 else f"{wanted}-{n}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("count() has no end")


def write_file(path: Path, content: str) -> None:
    """Writes a whole file at once. A symbolic link at `path` is replaced, and never followed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / REPORT
    >>> write_file(path, "<!doctype html>")
    >>> path.read_text()
    '<!doctype html>'
    """
    new = path.with_name(f".{path.name}-{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(new, "x", encoding="utf-8") as file:
        file.write(content)
    new.replace(path)


def rank() -> int:
    """Of this process among those that torchrun has started; 0 if there is just one."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def world_size() -> int:
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1


def share(folder: Path, runs: Path) -> Path:
    """Rank 0 writes down where it records, for the other ranks of the same launch."""
    pointer = _pointer(runs)
    write_file(pointer, folder.name)
    return pointer


def shared(runs: Path) -> Path | None:
    """Where rank 0 records; None if it does not write so in time, or is on another node."""
    if os.environ.get("GROUP_RANK", "0") != "0":
        return None
    until = time.monotonic() + _WAIT
    while time.monotonic() < until:
        try:
            flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            with open(os.open(_pointer(runs), flags), encoding="utf-8") as file:
                name = file.read(1000)
            folder = runs / name
            return folder if _is_plain(name) and not folder.is_symlink() else None
        except FileNotFoundError:
            time.sleep(0.05)
        except (OSError, ValueError):  # a link, or no text: it was not written by rank 0
            return None
    return None


def _pointer(runs: Path) -> Path:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return runs / f".launch-{os.getppid()}-{_launched()}-{int(restart) if restart.isdigit() else 0}"


def _launched() -> str:
    """When the launcher started. Its number alone comes back: in a container it is always the same,
    and a job that was killed leaves its pointer behind."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        return fields[19]
    except (OSError, IndexError):  # not on Linux
        return "0"


def journal_of(folder: Path | None, rank: int) -> Path:
    """Rank 0 has the journal; others keep a short one beside it, to be compared with it. Where
    `folder` is None it is not known to this rank, which uses the rule too and records nothing."""
    if folder is None:
        return Path(os.devnull)
    return folder / (JOURNAL if rank == 0 else f"rank-{rank}.jsonl")
