"""The command line, run as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).parent / "gradlift"


def gradlift(*arguments, by=(str(SCRIPT),)):
    return subprocess.run([*by, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("by", [(str(SCRIPT),), (sys.executable, "-m", "gradlift")])
def test_help_and_version(by):
    assert "demo" in gradlift("--help", by=by).stdout
    assert gradlift("--version", by=by).stdout.startswith("gradlift, version")


def test_formats():
    out = gradlift("formats").stdout
    for part in ("FP16", "65504", "2^-14", "2^-24", "E4M3", "448", "BF16"):
        assert part in out


def test_demo_shows_that_unscaled_float16_dies_and_scaled_does_not():
    done = gradlift("demo", "--steps", "150")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  float")]
    loss = {" ".join(cells[:-5]): float(cells[-5]) for cells in rows}
    assert set(loss) == {
        "float32",
        "float16 unscaled",
        "float16 static:2^10",
        "float16 dynamic",
        "float16 auto",
    }
    assert loss["float16 unscaled"] > 0.3
    assert loss["float16 auto"] < 0.1
    assert loss["float32"] < 0.1
    assert loss["float16 dynamic"] < 0.1


def test_unknown_command_is_a_usage_error():
    done = gradlift("fly")
    assert done.returncode == 2
    assert "No such command" in done.stderr
