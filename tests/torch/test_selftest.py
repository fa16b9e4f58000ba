"""gradlift selftest: all holds on the CPU, and a fault makes the right row fail."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode

from gradlift import rules
from gradlift.cli.selftest import selftest
from gradlift.errors import GradliftError
from gradlift.selftest import checks as _selftest
from gradlift.torch import GradScaler, MasterWeights
from gradlift.torch.scaler import on_device as _device
from gradlift.torch.scaler.accumulation import DropBad
from gradlift.torch.scaler.on_device import OnDevice
from gradlift.torch.scaler.scale import Scale

CPU = torch.device("cpu")
FAULTS = {}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def failed():
    return {o.name: o.reason for o in _selftest.outcomes(CPU) if o.held is False}


def test_all_holds_on_the_cpu():
    seen = {o.name: (o.held, o.reason) for o in _selftest.outcomes(CPU)}
    assert list(seen) == list(_selftest.CHECKS)
    waits = {name for name in seen if name.startswith("nothing waits")}
    assert len(waits) == 2
    assert {name for name, (held, _) in seen.items() if held is not True} == waits
    for name in waits:
        assert seen[name] == (None, "torch can tell who waits on cuda only, not on cpu")


def test_the_checks_take_the_path_of_an_accelerator(monkeypatch):
    taken = []
    move_to = Scale.move_to
    monkeypatch.setattr(Scale, "move_to", lambda self, *a: (taken.append(1), move_to(self, *a))[1])
    for check in _selftest.CHECKS.values():
        before = len(taken)
        with contextlib.suppress(_selftest.NotApplicable):
            check(CPU)
            assert len(taken) > before or check is _selftest._rules


# Faults, each with the rows that must notice it


def fault(*rows):
    def keep(function):
        FAULTS[function.__name__] = function, rows
        return function

    return keep


STORIES = tuple(name for name in _selftest.CHECKS if name.startswith("scales"))
MASTERS = tuple(name for name in _selftest.CHECKS if "weights: " in name)
JOURNAL = "journal one step late, then whole"
DROPPED = "accumulate, bad micro-batch dropped"


@fault(*STORIES, *MASTERS, DROPPED, JOURNAL, "retry of a batch")
def a_scale_that_never_moves(patch):
    patch.setattr(OnDevice, "move", lambda self, state, skips: None)


@fault(*STORIES, JOURNAL, "culprits named")
def culprits_unknown(patch):
    patch.setattr(_device, "culprits_by_peak", lambda *given: ())


@fault(JOURNAL, "clipping: norm against float64")
def a_norm_in_half_precision(patch):
    look = _device.device_look

    def rough(*given, **settings):
        found = look(*given, **settings)
        return found._replace(norm=found.norm.half().float()) if settings.get("norm") else found

    patch.setattr(_device, "device_look", rough)


@fault(*MASTERS)
def masters_that_step_twice(patch):
    step = MasterWeights.step
    patch.setattr(MasterWeights, "step", lambda self, *a, **k: (step(self, *a, **k), step(self))[0])


@fault("state saved and loaded")
def a_state_with_another_scale(patch):
    load = GradScaler.load_state_dict

    def wrong(self, state):
        load(self, state)
        self.update(2.0)

    patch.setattr(GradScaler, "load_state_dict", wrong)


@fault("rules to the bit, every preset")
def one_rule_that_differs_on_tensors(patch):
    kind = type(rules.preset("mxnet"))
    advance = kind.advance

    def off(self, state, reading, xp=None):
        after = advance(self, state, reading, xp)
        return after if xp is None else after._replace(left=after.left + 1)

    patch.setattr(kind, "advance", off)


@fault(JOURNAL)
def a_flush_that_forgets(patch):
    patch.setattr(GradScaler, "flush", lambda self: None)


@fault(DROPPED)
def a_dropped_batch_that_stays(patch):
    finish = DropBad.finish

    def keeps(self):
        finish(self)
        self.dropped.clear()

    patch.setattr(DropBad, "finish", keeps)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_the_right_rows(name, monkeypatch):
    inject, rows = FAULTS[name]
    inject(monkeypatch)
    found = failed()
    assert set(found) == set(rows), found
    assert all(found.values())


@pytest.mark.parametrize("records", [False, True])
def test_the_steps_under_guard_read_nothing(records):
    """What CUDA's debug mode sees there, a dispatch mode sees here: nobody reads a value."""
    seen = []

    class Ban(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__.split(".")[0]
            seen.append(name)
            assert name not in {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"}
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def guard():
        with Ban():
            yield

    _selftest.guarded_steps(CPU, guard, records)
    assert "_fused_adamw_" in seen


def test_an_op_that_the_device_lacks_is_a_finding(monkeypatch):
    def lacks(device):
        raise NotImplementedError("aten::hypot is not there. Please file an issue.\nMore.")

    monkeypatch.setattr(_selftest, "CHECKS", {"one": lacks})
    assert failed() == {"one": "NotImplementedError: aten::hypot is not there"}


# The command


def test_the_command_prints_a_table(monkeypatch):
    done = CliRunner().invoke(selftest, ["--device", "cpu"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[0] == f"cpu, by an accelerator's path, torch {torch.__version__}"
    rows = [line for line in lines if " passed " in line]
    assert len(rows) == 15
    assert rows[0].startswith("scales, skips, causes: SGD passed ")
    assert lines[-1] == "15 passed, 0 failed, 2 not applicable"


def test_a_failure_is_printed_and_the_status_is_1(monkeypatch):
    monkeypatch.setattr(_device, "culprits_by_peak", lambda *given: ())
    done = CliRunner().invoke(selftest, ["--device", "cpu"], env={"COLUMNS": "160"})
    assert done.exit_code == 1
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    (row,) = [line for line in lines if line.startswith("culprits named")]
    assert "failed: culprits: [], on the CPU ['above (nan)', 'below (inf)']" in row


@pytest.mark.parametrize("name", ["warp", "meta", "mps"])
def test_a_device_that_cannot_be_used_is_one_line(name):
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    done = CliRunner().invoke(selftest, ["--device", name])
    assert isinstance(done.exception, GradliftError)
    message = str(done.exception)
    assert message.startswith(f"cannot use the device '{name}': ")
    assert "\n" not in message


def test_without_torch_it_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gradlift.cli.selftest import selftest\n"
        "selftest([])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    said = done.stderr.strip().splitlines()[-1]
    assert said.endswith("the selftest needs PyTorch: pip install 'gradlift[torch]'")


def test_importing_the_command_imports_no_torch():
    code = "import sys, gradlift.cli.selftest; print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.stdout == "False\n", done.stderr
