"""Trains in a forked child, kills it with SIGKILL, resumes in another, compares: one adapter.

A training is a class with a journal given to it:

    Training(journal)      everything made anew, in a process that has been forked
    .step(n, mark)         one step; mark("...") names what follows
    .save(folder), .load(folder)
    .state()               arrays and text that a resumed run must have to the bit
    .lag                   how many finished steps the journal may not have yet
    .warm()                optional: what can be done before the process is forked

JAX and TensorFlow hang in a child of a process that has used them. So there the parent imports, and
each child begins; NumPy and torch (on a CPU) are forked warm.

Checkpoints are saved as users should: written under another name, then renamed.
"""

import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from gradlift import Journal, read_journal

STEPS, EVERY = 12, 3  # steps of a run, steps between two checkpoints
BAD = (4, 7)  # steps of which the first overflows, and the second has a loss that is NaN
PATIENCE = 120.0  # seconds


class Marks:
    """Memory that a child shares with its parent: what it is doing, and when each step began."""

    def __init__(self):
        self.memory = mmap.mmap(-1, 4096)

    def __call__(self, what):
        self.memory[256:320] = what.encode().ljust(64, b"\0")

    @property
    def what(self):
        return self.memory[256:320].decode().strip("\0 ")

    def begin(self, step):
        struct.pack_into("d", self.memory, 8 * (step + 1), time.monotonic())
        struct.pack_into("d", self.memory, 0, step + 1)

    @property
    def begun(self):
        """How many steps have begun; STEPS + 1 after the last."""
        return int(struct.unpack_from("d", self.memory, 0)[0])

    def seconds(self):
        times = struct.unpack_from(f"{STEPS + 1}d", self.memory, 8)
        return [b - a for a, b in pairwise(times)]

    def clear(self):
        self.memory[:] = bytes(4096)


def live(training_class, folder, marks, in_write=None):
    """One life of a run: resumes from the last checkpoint, trains to the end, says what came of it.

    `in_write` is (n, k): the process kills itself when k bytes of its n-th line are written.
    """
    journal = Journal(folder / "run.jsonl")
    if in_write is not None:
        journal._lines.file = DyingFile(journal._lines.file, *in_write, marks)
    training, first = training_class(journal), 0
    saved = sorted(folder.glob("step-*"))
    if saved:
        training.load(saved[-1])
        first = int(saved[-1].name.removeprefix("step-"))
    for step in range(first, STEPS):
        marks.begin(step)
        training.step(step, marks)
        if (step + 1) % EVERY == 0:
            marks("save")
            new = folder / "new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            training.save(new)
            marks("rename")
            os.rename(new, folder / f"step-{step + 1:03}")
    marks.begin(STEPS)
    marks("end")
    held = [np.ascontiguousarray(x) for x in training.state()]
    said = [f"{x.dtype} {x.shape} {hashlib.sha256(x.tobytes()).hexdigest()}" for x in held]
    journal.close()
    (folder / "end.json").write_text(json.dumps(said))


class DyingFile:
    """Kills its process in the middle of a write."""

    def __init__(self, file, line, after, marks):
        self.file, self.line, self.after, self.marks = file, line, after, marks

    def write(self, data):
        self.line -= 1
        if self.line == 0:
            self.file.write(data[: self.after % len(data)])
            self.marks("journal line")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def forked(function, *given):
    """A child that calls this, and leaves without the teardown of what it inherited."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*given)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def ended(child):
    """Its exit status; a child that does not come to an end is killed, and that is an error."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"a forked child did not end within {PATIENCE:.0f} s")


def undisturbed(training_class, folder, marks):
    marks.clear()
    status = ended(forked(live, training_class, folder, marks))
    assert status == 0, f"a run that nobody kills ended with {status}"
    return story(folder)


def story(folder):
    """What a run came to: the bits at its end, and its steps (of two lines of one step, the later
    one) without the time they took."""
    run, _ = read(folder)
    steps = {s.step: s._replace(seconds=0.0) for s in run.steps}
    state = json.loads((folder / "end.json").read_text())
    return {"state": state, "steps": [repr(steps[n]) for n in sorted(steps)]}


def read(folder):
    """The journal, and how many lines of it are damaged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = read_journal(folder / "run.jsonl")
    if not caught:
        return run, 0
    (text,) = (str(w.message) for w in caught)
    return run, 0 if "empty" in text else int(text.split(": ")[1].split()[0])


def killed(training_class, folder, marks, rng, seconds, number):
    """A life that is killed at an instant of its own, every fourth in a write; what it was doing.
    None if it was through before."""
    marks.clear()
    first = max((int(p.name.removeprefix("step-")) for p in folder.glob("step-*")), default=0)
    if number % 4 == 3:
        in_write = rng.randrange(1, STEPS - first + 2), rng.randrange(1, 10_000)
        status = ended(forked(live, training_class, folder, marks, in_write))
    else:
        at = rng.randrange(first, STEPS)
        child = forked(live, training_class, folder, marks)
        limit = time.monotonic() + PATIENCE
        while marks.begun <= at and time.monotonic() < limit:
            time.sleep(0.0002)
        time.sleep(rng.random() * seconds[at])
        os.kill(child, signal.SIGKILL)
        status = ended(child)
    return (marks.what or "begin") if status == -signal.SIGKILL else None


def survive(training_class, kills, seed=0):
    """Kills runs so many times, up to three times each, and lets each come to its end: where in
    the step they were killed, which journals were not readable, which ends were not the same."""
    rng, marks = random.Random(seed), Marks()
    getattr(training_class, "warm", bool)()
    fell, different, unreadable, runs = Counter(), [], [], 0
    with tempfile.TemporaryDirectory(prefix="gradlift-kills-") as home:
        expected = undisturbed(training_class, _made(home, "undisturbed"), marks)
        seconds = marks.seconds()
        assert len(expected["steps"]) == STEPS, "the journal of an undisturbed run is not complete"
        while fell.total() < kills:
            runs += 1
            folder, here = _made(home, str(runs)), []
            for _ in range(rng.randrange(1, 4)):
                if (folder / f"step-{STEPS:03}").exists() or fell.total() == kills:
                    break
                what = killed(training_class, folder, marks, rng, seconds, fell.total())
                if what is None:
                    break
                here.append(what)
                fell[what] += 1
                done = max(marks.begun - 1 - training_class.lag, 0)
                if wrong := not_readable(folder, done, len(here)):
                    unreadable.append(f"run {runs}, killed in {here}: {wrong}")
            if here:
                try:
                    before, finished = headers(folder), (folder / f"step-{STEPS:03}").exists()
                    told = undisturbed(training_class, folder, marks)
                    wrong = [name for name in told if told[name] != expected[name]]
                    if headers(folder) != before + (not finished):
                        wrong.append("the header of its last life")
                except Exception as error:
                    wrong = repr(error)
                if wrong:
                    different.append(f"run {runs}, killed in {here}: {wrong}")
            shutil.rmtree(folder)
    return {"runs": runs, "fell": dict(fell), "different": different, "unreadable": unreadable}


def headers(folder):
    """How many lives have begun to write the journal: each begins with a header of its own."""
    if not (folder / "run.jsonl").exists():
        return 0
    run, _ = read(folder)
    return bool(run.header) + sum(e.what == "resume" for e in run.events)


def not_readable(folder, done, kills):
    """What is wrong with a journal after a kill: each may damage one line, the one that was being
    written, and every step that was done must be there."""
    if not (folder / "run.jsonl").exists():
        return f"there is none after {done} steps" if done else ""
    run, damaged = read(folder)
    steps = sorted({s.step for s in run.steps})
    if damaged > kills or steps != [*range(len(steps))] or len(steps) < done:
        return f"{damaged} lines damaged by {kills} kills, {done} steps done, {steps} found"
    return ""


def _made(home, name):
    folder = Path(home) / name
    folder.mkdir()
    return folder
