"""A journal and real faults: full disks, file systems and folders that go away, other processes."""

import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import warnings

import pytest

from gradlift import Journal, read_journal
from gradlift.errors import JournalError, JournalWarning
from gradlift.journal import Step, writer

PRELUDE = """
import fcntl, os, resource, struct, subprocess, sys, warnings
from gradlift import Journal
from gradlift.journal import Step, writer

writer._PAUSE = 0.0
warnings.simplefilter("always", append=True)

def train(journal, steps):
    for step in steps:
        journal.step(Step(step, 8.0, 8.0, loss=0.5))

def run(*command):
    subprocess.run(command, check=True)

os.chdir(sys.argv[1])
"""

LIMITED = """
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
journal = Journal("run.jsonl")
train(journal, range(500))
print(os.path.getsize("run.jsonl"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
train(journal, range(500, 501))
"""

SMALL = """
os.mkdir("small")
run("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", "small")
journal = Journal("small/run.jsonl")
train(journal, range(500))
print(os.path.getsize("small/run.jsonl"))
run("mount", "-o", "remount,size=1m", "small")
train(journal, range(500, 501))
journal.close()
run("cp", "small/run.jsonl", "run.jsonl")
"""

# 0x8004587D is EXT4_IOC_SHUTDOWN; with 1 the log is written first, with 2 all is lost since the
# last commit. What then takes the place of the file system is what its disk holds.
SHUT_DOWN = """
os.mkdir("disk")
with open("first.img", "wb") as file:
    file.truncate(8 << 20)
run("mkfs.ext4", "-q", "first.img")
run("mount", "-o", "loop", "first.img", "disk")
try:
    journal = Journal("disk/run.jsonl", fsync=True)
    train(journal, range(10))
    journal._lines.fsync = False
    train(journal, range(10, 15))
    folder = os.open("disk", os.O_RDONLY)
    fcntl.ioctl(folder, 0x8004587D, struct.pack("I", 2))
    os.close(folder)
    train(journal, range(15, 20))
    run("umount", "-l", "disk")
    train(journal, range(20, 25))  # an empty folder is there now
    print(os.listdir("disk"))
    run("cp", "first.img", "second.img")
    run("mount", "-o", "loop", "second.img", "disk")
    train(journal, range(25, 30))
    journal.close()
    run("cp", "disk/run.jsonl", "run.jsonl")
finally:
    run("umount", "-l", "disk")
"""


def watched(folder, script, *within):
    """What a script printed, and the warnings in it, of a process of its own."""
    command = [*within, sys.executable, "-c", PRELUDE + script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.count("Warning: ")


def numbers(path):
    return [s.step for s in read_journal(path).steps]


def write(journal, *steps):
    for step in steps:
        journal.step(Step(step, 8.0, 8.0))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(writer, "_PAUSE", 0.0)


# The disk


def test_a_file_size_limit(tmp_path):
    """Python ignores the signal of the limit; the write is short, then it fails."""
    said, warned = watched(tmp_path, LIMITED)
    assert 4900 < int(said) <= 5000
    assert warned == 1
    assert numbers(tmp_path / "run.jsonl") == [*range(501)]


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.call(["unshare", "-rm", "true"]) != 0,
    reason="no mounts in a name space of one's own here",
)
def test_a_disk_that_is_full_and_has_room_again(tmp_path):
    said, warned = watched(tmp_path, SMALL, "unshare", "-rm")
    assert 16000 < int(said) <= 16384
    assert warned == 1
    assert numbers(tmp_path / "run.jsonl") == [*range(501)]


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mkfs.ext4") is None,
    reason="only root mounts an ext4 file system",
)
def test_a_file_system_that_goes_away_and_comes_back(tmp_path):
    """Of lines that fsync has not put on the disk, those that are gone are counted."""
    said, warned = watched(tmp_path, SHUT_DOWN)
    assert said == "[]\n"
    assert warned == 1
    run = read_journal(tmp_path / "run.jsonl")
    steps = [s.step for s in run.steps]
    assert steps[:10] == [*range(10)]
    assert steps[-5:] == [*range(25, 30)]
    assert sorted({*steps}) == steps
    assert sum(e.detail["dropped"] for e in run.events if e.what == "note") == 30 - len(steps)


def test_a_folder_that_is_removed_in_mid_run(tmp_path):
    """It is not made again: who removes it may mean it. Should it come back, nothing is missing."""
    path = tmp_path / "runs" / "run.jsonl"
    with Journal(path) as journal:
        write(journal, 0, 1)
        shutil.rmtree(path.parent)
        with pytest.warns(JournalWarning, match="it was removed. Training goes on") as caught:
            write(journal, 2, 3)
        assert len(caught) == 1
        assert not path.parent.exists()
        path.parent.mkdir()
        write(journal, 4)
        assert numbers(path) == [0, 1, 2, 3, 4]


def test_a_folder_that_is_removed_at_the_end_stays_removed(tmp_path, recwarn):
    """As a temporary folder is, before the journal is closed."""
    path = tmp_path / "runs" / "run.jsonl"
    journal = Journal(path)
    write(journal, 0, 1)
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    journal.close()
    assert os.listdir(path.parent) == []
    assert not recwarn.list


def test_a_journal_that_is_removed_or_replaced(tmp_path):
    path = tmp_path / "run.jsonl"
    with Journal(path) as journal:
        write(journal, 0)
        path.unlink()
        path.write_text("something else\n")
        with pytest.warns(JournalWarning, match="it was removed"):
            write(journal, 1)
        assert path.read_text() == "something else\n"
        path.unlink()
        write(journal, 2)
    with Journal(path) as journal:
        write(journal, 3)
        path.unlink()
        with pytest.warns(JournalWarning, match="it was removed"):
            write(journal, 4)
    assert numbers(path) == [0, 1, 2, 3, 4]


def test_a_journal_that_is_moved_is_written_where_it_is(tmp_path, recwarn):
    with Journal(tmp_path / "run.jsonl") as journal:
        write(journal, 0)
        os.rename(tmp_path / "run.jsonl", tmp_path / "moved.jsonl")
        write(journal, 1)
    assert numbers(tmp_path / "moved.jsonl") == [0, 1]
    assert not recwarn.list


# Other processes

CLAIM = """
import sys
from gradlift import Journal
from gradlift.journal import Step
with Journal(sys.argv[1]) as journal:
    journal.step(Step(99, 8.0, 8.0))
"""


def another_process(path):
    """What a process of its own says when it writes there too."""
    done = subprocess.run([sys.executable, "-c", CLAIM, path], capture_output=True, text=True)
    return done.stderr.splitlines()[-1] if done.returncode else "written"


def in_child(function):
    """The exit status of a forked child that calls this; 0 if it returned true."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if function() else 1
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_another_process(tmp_path):
    """It may not write what its parent writes, and its end does not open the parent's journal."""
    path = tmp_path / "run.jsonl"

    def refused():
        try:
            write(Journal(path), 1)
        except JournalError as error:
            return "written by another process" in str(error)

    with Journal(path) as journal:
        write(journal, 0)
        assert in_child(refused) == 0
        assert "written by another process" in another_process(path)
        write(journal, 1)
    assert numbers(path) == [0, 1]


def test_a_child_that_outlives_its_parent_keeps_nobody_out(tmp_path):
    """A worker that a training process forked, and that hangs on after the process was killed."""
    path, reader_writer = tmp_path / "run.jsonl", os.pipe()

    def trains_and_dies():
        write(Journal(path), 0)
        worker = os.fork()
        if worker == 0:
            os.read(reader_writer[0], 1)
            os._exit(0)
        os.kill(os.getpid(), 9)

    assert in_child(trains_and_dies) == -9
    with Journal(path) as journal:
        write(journal, 1)
    os.write(reader_writer[1], b"!")
    assert numbers(path) == [0, 1]


def test_reading_ones_own_journal_does_not_open_it_to_others(tmp_path):
    """POSIX gives a lock up when its process closes the file anywhere: it is taken again."""
    path = tmp_path / "run.jsonl"
    with Journal(path) as journal:
        write(journal, 0)
        assert numbers(path) == [0]
        write(journal, 1)
        assert "written by another process" in another_process(path)


# x86-64's fcntl is call 72, F_SETLK is 6: a filter that answers it with ENOLCK, as some network
# file systems do. Each instruction is a code, two jumps and a number; see seccomp(2).
FILTER = [
    (0x20, 0, 0, 0),  # which call?
    (0x15, 0, 3, 72),
    (0x20, 0, 0, 24),  # its second argument
    (0x15, 0, 1, 6),
    (0x06, 0, 0, 0x00050000 | errno.ENOLCK),
    (0x06, 0, 0, 0x7FFF0000),
]


def without_locks():
    """From here on this process gets ENOLCK for every lock that it asks for."""
    code = b"".join(
        op.to_bytes(2, "little") + bytes([yes, no]) + k.to_bytes(4, "little")
        for op, yes, no, k in FILTER
    )
    held = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(
        len(FILTER).to_bytes(8, "little") + ctypes.addressof(held).to_bytes(8, "little"), 16
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="the filter is x86-64's"
)
def test_where_there_are_no_locks_a_second_writer_is_found_by_its_lines(tmp_path):
    path = tmp_path / "run.jsonl"

    def warned():
        without_locks()
        with open(tmp_path / "any", "wb") as file, pytest.raises(OSError, match="No locks"):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = Journal(path), Journal(path)
            write(first, 0, 1)
            alone = len(caught)
            write(second, 2)
            write(first, 3, 4)
            write(second, 5)
        said = {str(w.message).partition(" among")[0] for w in caught}
        return (
            alone == 0 and len(caught) == 2 and said == {f"{path} holds lines of another process"}
        )

    assert in_child(warned) == 0
    assert numbers(path) == [0, 1, 2, 3, 4, 5]  # mixed, but each line is whole
