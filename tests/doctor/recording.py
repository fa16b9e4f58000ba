"""Records scripts as `gradlift run` does, in forks of one process that has imported torch."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import torch

from gradlift.analysis.diagnosis import diagnose
from gradlift.journal import Journal, read_journal
from gradlift.observe import script as scripts
from gradlift.session import Session

HERE = Path(__file__).parent
AT_A_TIME = 2
RANKS = "ranks_disagree"  # the folder of scripts that need two processes


def scripts_of(*groups):
    """Every script of "faults", "cured", "healthy", as paths relative to this folder."""
    found = [p for group in groups for p in sorted((HERE / group).rglob("*.py"))]
    return [p.relative_to(HERE) for p in found]


def record_all(paths, folder):
    """Records each script; returns the journal of each."""
    ranks = [path for path in paths if path.parts[1] == RANKS]
    alone = [path for path in paths if path.parts[1] != RANKS]
    return {**_record_alone(alone, folder), **{p: _record_ranks(p, folder) for p in ranks}}


def _record_ranks(path, folder):
    """A job of two processes, each under `gradlift run`. Whatever the script, torch's own threads
    now and then abort an interpreter that is ending: such a job is started again."""
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gradlift")
    name = "-".join(path.with_suffix("").parts)
    run = ("run", "-q", "--no-report", "--runs-dir", str(folder), "--name", name)
    for _ in range(3):
        shutil.rmtree(folder / name, ignore_errors=True)
        done = subprocess.run(
            [sys.executable, *words, *run, str(HERE / path)], capture_output=True, text=True
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, f"{path} could not be recorded: {done.stderr[-2000:]}"
    journal = folder / name / "journal.jsonl"
    journal.with_suffix(".log").write_text(done.stdout)
    return journal


def _record_alone(paths, folder):
    torch.set_num_threads(1)  # a fork has no OpenMP threads
    names = {p: p.stem if p.is_absolute() else "-".join(p.with_suffix("").parts) for p in paths}
    journals = {path: folder / f"{name}.jsonl" for path, name in names.items()}
    waiting, running = list(paths), {}
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            path = waiting.pop(0)
            running[_start(HERE / path, journals[path])] = path
        done, status = os.wait()
        path = running.pop(done)
        assert os.waitstatus_to_exitcode(status) == 0, f"{path} could not be recorded"
    return journals


def _start(path, journal):
    child = os.fork()
    if child:
        return child
    try:
        with open(journal.with_suffix(".log"), "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (pytest's own is elsewhere)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        _record(path, journal)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _record(path, journal):
    warnings.resetwarnings()  # the tests' own filters are not the script's
    sys.argv = [str(path)]
    made = Journal(journal)
    made.describe(mode="run", command=[str(path)], every=50, world_size=1)
    with Session(made) as session:
        ending = scripts.run([str(path)])
        ending.show()
        session.end(ending.error, ending.status)
    sys.stdout.flush()


def findings(journal):
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return diagnose(read_journal(journal))


def output(journal):
    return journal.with_suffix(".log").read_text()
