"""Runs a script as `python script.py` would."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.util
import os
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import GradliftError
from .stopping import Stopped

_GRACE = 10.0  # seconds for a report, after SIGTERM


class ScriptError(GradliftError):
    """The script cannot be run at all."""


class _Terminated(BaseException):
    """SIGTERM, as an exception: what is recorded can be finished before the process ends."""


def check(command: Sequence[str]) -> str:
    """The script's stem, or the module's last name; an error if there is no such file.

    >>> check(["-m", "json.tool"])
    'tool'
    """
    if not command:
        raise ScriptError("no script: call gradlift run [options] script.py [its arguments]")
    if command[0] == "-m":
        if len(command) < 2:
            raise ScriptError("-m needs the name of a module")
        if not _is_module(command[1]):
            raise ScriptError(f"there is no module {command[1]}")
        return command[1].rpartition(".")[2]
    path = Path(command[0])
    if path.is_dir():
        path = path / "__main__.py"
    if not path.is_file():
        raise ScriptError(f"there is no script {command[0]}")
    return path.parent.name if path.name == "__main__.py" else path.stem


def _is_module(name: str) -> bool:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def run(command: Sequence[str]) -> Ending:
    """Runs a script (`["train.py", "--lr", "1"]`, or `["-m", "package", ...]`) to its end."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
        _insist()
    ending = Ending()
    try:
        _execute(list(command))
    except SystemExit as done:
        ending.status = done.code
    except BaseException as error:  # the script's own, KeyboardInterrupt among them
        ending.error = error
    finally:
        if signal.getsignal(signal.SIGTERM) is _terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return ending


class Ending:
    """How a script ended; `leave` ends this process the same way."""

    def __init__(self) -> None:
        self.status: Any = 0
        self.error: BaseException | None = None

    @property
    def well(self) -> bool:
        return self.error is None and self.status in (0, None)

    def show(self) -> None:
        """Prints the script's error without gradlift's own frames, and waits for its threads,
        as Python does."""
        error = self.error
        if error is not None and not isinstance(error, (_Terminated, Stopped)):
            trace = error.__traceback__
            while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
                trace = trace.tb_next
            shown = error.with_traceback(trace)
            sys.excepthook(type(error), shown, trace)  # the script may have put its own there
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()

    def leave(self) -> None:
        if isinstance(self.error, KeyboardInterrupt):
            atexit._run_exitfuncs()  # as Python does before it ends by the signal
            vars(sys.modules["__main__"]).clear()  # closes what the script left open
            gc.collect()
            _end_by(signal.SIGINT)
        if isinstance(self.error, _Terminated):
            _end_by(signal.SIGTERM)
        sys.exit(1 if self.error is not None else self.status)


def _end_by(number: signal.Signals) -> None:
    """So that the shell sees what it would have seen."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _execute(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    path = Path(command[0]).absolute()
    if path.is_dir():
        path = path / "__main__.py"
    sys.argv = command
    sys.path[0] = str(path.resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main  # stays: what the script leaves behind may look for it
    # dont_inherit: the script has its own `from __future__` lines, and not this file's.
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)


def _terminated(*_: Any) -> None:
    raise _Terminated


def _insist() -> None:
    """Ends a process that is asked to end while it waits in C, where no exception can reach it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while True:
            asked = os.read(reading, 1)[0] == signal.SIGTERM
            if asked and signal.getsignal(signal.SIGTERM) is _terminated:  # not the script's own
                time.sleep(_GRACE)
                os._exit(128 + signal.SIGTERM)

    def ours(on: bool) -> None:
        """A forked child must end by the signal at once, and not wake us: ours stays here."""
        mine, other = (signal.SIG_DFL, _terminated) if on else (_terminated, signal.SIG_DFL)
        if signal.getsignal(signal.SIGTERM) is mine:
            with contextlib.suppress(ValueError):  # forked by a thread: only the main one may do so
                signal.signal(signal.SIGTERM, other)
                signal.set_wakeup_fd(writing if on else -1, warn_on_full_buffer=False)

    threading.Thread(target=wait, daemon=True).start()
    os.register_at_fork(
        before=lambda: ours(False),
        after_in_parent=lambda: ours(True),
        after_in_child=lambda: ours(False),
    )


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen runpy>") or file == runpy.__file__
