"""Recording in Python and in a notebook: what `gradlift run` does to a script, for a block of code.

record(...) -> Session -> run, doctor(), report()
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .analysis.diagnosis import diagnose
from .analysis.findings import Finding
from .errors import TrainingHalted
from .journal import JOURNAL, Journal, Recorder, Run, current, read_journal, set_current
from .observe import folder as runs
from .observe.ending import ending
from .observe.imports import when_imported
from .observe.places import Places
from .rules import parse

RUNS = "gradlift-runs"


class Findings(list[Finding]):
    """What is wrong with a run, most serious first; printed as text.

    >>> print(Findings(Run(), [Finding("hint", "Odd scale", "It was 1000.", advice="Take 1024.")]))
    hint: Odd scale
      It was 1000.
      -> Take 1024.
    """

    def __init__(self, run: Run, found: Sequence[Finding]) -> None:
        super().__init__(found)
        self.run = run

    def __repr__(self) -> str:
        from .report.story import looks, verdict

        if not self:
            return "\n".join([verdict(self.run, self)[1], *looks(self.run)])
        return "\n".join(
            f"{f.severity}: {f.title}" + (f" ({f.place})" if f.place else "") + f"\n  {f.evidence}"
            f"{self._advice(f)}"
            for f in self
        )

    @staticmethod
    def _advice(finding: Finding) -> str:
        return f"\n  -> {finding.advice}" if finding.advice else ""

    __str__ = __repr__


class Session:
    """A run that is being recorded, or was. `gradlift.record` makes one.

    >>> import gradlift, os, tempfile
    >>> with gradlift.record(os.path.join(tempfile.mkdtemp(), "run.jsonl")) as session:
    ...     pass
    >>> session.recorded, session.run.steps
    (False, [])
    """

    def __init__(
        self,
        journal: Journal,
        *,
        every: int | None = 50,
        rule: str | None = None,
        rerun: bool = True,
        source: bool = True,
    ) -> None:
        if rule is not None:
            parse(rule)
        self._places = Places(source=source)
        self.path = journal.path
        self.rerun = rerun
        self._journal = journal
        self._recorder = Recorder(journal, every=every, rule=rule)
        self._undo: list[Callable[[], None]] = []
        self._hooks: Any = None
        self._around: Recorder | None = None
        self.what_was_seen = ""
        """One sentence, once the recording has ended."""

    def __enter__(self) -> Session:
        self._around = current()
        if self._around is not None:  # such as `gradlift run`, which must not break a script
            for journal in self._around.journals:
                text = f"a block of code was recorded by itself, in {self.path}"
                journal.event("note", code="session", text=text)
        if self._recorder.rule is not None:
            self._journal.describe(exchanged=self._recorder.rule)
        set_current(self._recorder)
        self._undo.append(when_imported("torch", self._watch_torch))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    def _watch_torch(self) -> None:
        from .observe.patches import Patches
        from .observe.torch.hooks import Hooks

        self._hooks = Hooks(self._recorder, rerun=self.rerun, places=self._places)
        self._undo.append(self._hooks.remove)
        if self._recorder.rule is not None:
            from .observe.torch.exchange import exchange

            patches = Patches()
            exchange(patches)
            self._undo.append(patches.restore)

    def end(self, error: BaseException | None = None, status: object = 0) -> None:
        """Ends the recording: everything is put back, and a sentence says what was seen."""
        if current() is not self._recorder:
            return
        _flush_scalers()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.what_was_seen = self._seen()
        if not self._recorder.channels:
            self._journal.event("note", code="nothing", text=self.what_was_seen)
        facts = ending(error, self._places.place, status)
        self._places.write_source(self._recorder)
        self._recorder.flush()
        self._journal.event("end", **facts)
        if isinstance(error, Exception):
            text = f"ended by {facts['type']}: {facts['message']}"[:200]
            self.what_was_seen = f"{self.what_was_seen}\n{text}".strip()
        set_current(self._around)
        self._journal.close()

    def _seen(self) -> str:
        disabled = sorted(self._hooks.disabled) if self._hooks is not None else []
        off = f" {disabled[0]} is disabled: nothing is scaled." if disabled else ""
        if self._recorder.channels:
            scaled = any(str(c.rule) != "off" for c in self._recorder.channels)
            how = "" if scaled else "No scaler was seen: steps of optimizers were recorded."
            return (how + off).strip()
        if "keras" in sys.modules:
            return _two_lines("Keras", *_KERAS)
        if "torch" in sys.modules:
            return (
                f"torch was imported, but no optimizer stepped: there was nothing to record.{off}"
            )
        if "jax" in sys.modules:
            return _two_lines("JAX", *_JAX)
        return "Nothing was recorded: neither torch, jax nor keras was imported."

    @property
    def recorded(self) -> bool:
        """Was there a single line?"""
        return bool(self._recorder.channels)

    @property
    def run(self) -> Run:
        """The steps recorded so far."""
        return read_journal(self.path)

    def doctor(self) -> Findings:
        """What is wrong with the run, most serious first."""
        run = self.run
        return Findings(run, diagnose(run))

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes the run's page; by default beside its journal."""
        from . import report

        page = Path(path) if path is not None else self.path.with_name(runs.REPORT)
        runs.write_file(page, report.html(self.run))
        return page


def record(
    path: str | os.PathLike[str] | None = None,
    *,
    every: int = 50,
    rule: str | None = None,
    rerun: bool = True,
    source: bool = True,
) -> Session:
    """Records the training inside a `with` block, and changes nothing in it.

    | argument | meaning |
    |---|---|
    | `path` | the journal; None: a new folder in `gradlift-runs` |
    | `every` | steps between two samples of each parameter's gradient |
    | `rule` | another rule than the code's: the one thing that is exchanged |
    | `rerun` | once a loss is not finite, run its forward pass again to find the cause |
    | `source` | record the lines of your code that the findings are about |

    torch's scalers and optimizers are watched by hooks, which are removed at the end; those of
    gradlift record by themselves if they are made inside the block.

    >>> import gradlift, os, tempfile
    >>> import gradlift.numpy as gl, numpy as np
    >>> with gradlift.record(os.path.join(tempfile.mkdtemp(), "run.jsonl")) as session:
    ...     scaler = gl.Scaler("static:8")
    ...     scaler.step({}, {"w": np.float16([2.0])}, lambda weights, grads: None) and None
    >>> session.run.steps[0].amax, session.doctor() == []
    (2.0, True)
    """
    journal = Journal(_place(path, sys.argv))
    return Session(journal, every=every, rule=rule, rerun=rerun, source=source)


def _place(path: str | os.PathLike[str] | None, command: Sequence[str]) -> Path:
    """Rank 0 writes to `path`, or to a folder of its own; rank r to rank-r.jsonl beside it."""
    rank = runs.rank()
    if path is not None:
        return Path(path) if rank == 0 else runs.journal_of(Path(path).parent, rank)
    home = Path(RUNS).absolute()
    if rank > 0:
        return runs.journal_of(runs.shared(home), rank)
    folder = runs.make("session", home, None, command)
    if runs.world_size() > 1:
        runs.share(folder, home)
    return folder / JOURNAL


def _flush_scalers() -> None:
    """gradlift's own scalers record a device's step one step later: now comes the last one."""
    adapter = sys.modules.get("gradlift.torch")
    kind = getattr(adapter, "GradScaler", None)
    if kind is not None:
        for scaler in [o for o in gc.get_objects() if issubclass(type(o), kind)]:
            with contextlib.suppress(TrainingHalted):  # it is recorded
                kind.flush(scaler)


_JAX = "import gradlift.jax", "gradlift.jax.log(None, result, step)  # after each step, outside jit"
_KERAS = (
    "from gradlift.keras import LossScaleOptimizer, ScaleLogger  # compile with the first",
    "model.fit(..., callbacks=[ScaleLogger()])",
)


def _two_lines(framework: str, *lines: str) -> str:
    """A framework that has no hooks: what to add to the script."""
    shown = "\n".join(f"    {line}" for line in lines)
    return f"{framework} scripts record by themselves, if these two lines are in them:\n{shown}"
