"""What the doctor says of logs with faults in them, and what it does not say of sound ones."""

import random

import pytest
from click.testing import CliRunner
from helpers.logs import bar, deepspeed, deepspeed_step, file, megatron, trainer

from gradlift import diagnose
from gradlift.analysis.coverage import coverage
from gradlift.cli._group import gradlift
from gradlift.errors import LogError
from gradlift.logs import read_log

NAN = float("nan")


def found(tmp_path, lines):
    return diagnose(read_log(file(tmp_path / "run.log", lines)))


def kinds(tmp_path, lines):
    return [f.kind for f in found(tmp_path, lines)]


def sound(n, first=1, seed=0):
    """Megatron's lines of a run that trains."""
    rng = random.Random(seed)
    norms = (rng.uniform(0.5, 1.5) for _ in range(n))
    return [megatron(i, 5 - i / 1000, norm=g) for i, g in zip(range(first, first + n), norms)]


HEALTHY = {
    "megatron": sound(300),
    "megatron every 100": [megatron(100 * i, 5 - i / 100, norm=1.0) for i in range(1, 40)],
    "deepspeed, a search": [
        *(deepspeed(2**e, 2 ** (e - 1)) for e in range(16, 12, -1)),
        *(deepspeed_step(10 * i, 4) for i in range(1, 60)),
    ],
    "an overflow a growth": [
        line
        for i in range(1, 30)
        for line in (deepspeed_step(1000 * i, i), deepspeed(32768, 16384))
    ],
    "transformers": [trainer(f"{3 - i / 100:.4g}", "1.2") for i in range(100)],
    "nanogpt": [f"iter {i}: loss {4 - i / 1000:.4f}, time 97.01ms" for i in range(0, 2000, 10)],
    "a skip now and then": [
        *sound(100),
        megatron(101, scale=32768.0, skipped=1),
        *(megatron(i, 4.9, 32768.0, 1.0) for i in range(102, 200)),
    ],
    "lines seldom": [
        line
        for i in range(1, 21)
        for line in (*([deepspeed(64, 32)] if i % 3 == 0 else []), deepspeed_step(100 * i, i // 3))
    ],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_about_a_sound_log(name, tmp_path):
    assert kinds(tmp_path, HEALTHY[name]) == []


FALLING = [
    line
    for i, e in enumerate(range(11, 0, -1))
    for line in (
        bar(40 * i + 20) + deepspeed(2**e, 2 ** (e - 1)),
        bar(40 * i + 40) + "\r" + trainer("1.9", "0.5"),
    )
]
FAULTS = {
    "floor": [
        *sound(20),
        *(megatron(20 + i, scale=max(1.0, 2.0 ** (15 - i)), skipped=1) for i in range(1, 30)),
    ],
    "scale-falls": FALLING,
    "start": [
        *(deepspeed(2**e, 2 ** (e - 1)) for e in range(32, 12, -1)),
        *(deepspeed_step(10 * i, 20) for i in range(3, 30)),
    ],
    "nan-applied": [*sound(50), *(megatron(i, NAN, norm=NAN) for i in range(51, 60))],
    "forward-nan": [*sound(50), *(megatron(50 + i, skipped=1, bad=1) for i in range(1, 60))],
    "norm-nonfinite": [
        *(trainer("2.5", "1.0") for _ in range(20)), *(trainer("0.0", "nan") for _ in range(9))
    ],
    "norm-rising": [*sound(60), *(megatron(60 + i, 4.9, norm=20.0 * i) for i in range(1, 9))],
    "diverging": [
        f"iter {i}: loss {2 - i / 1000 + 1.3 ** max(0, i - 50):.4f}, time 9ms" for i in range(80)
    ],
    "spike": [
        f"iter {i}: loss {90.0 if i == 50 else 2 - i / 1000:.4f}, time 9ms" for i in range(100)
    ],
    "thrash": [
        line
        for i in range(1, 12)
        for line in (
            megatron(20 * i, 2.0, 65536.0, 1.0),
            megatron(20 * i + 1, scale=32768.0, skipped=1, norm=None),
            megatron(20 * i + 2, 2.0, 32768.0, 1.0),
        )
    ],
    "overflows": [
        line
        for i in range(1, 100, 6)
        for line in (*sound(5, i, i), megatron(i + 5, scale=65536.0 + i, skipped=1))
    ],
    "resume-without-scaler": [
        *(megatron(i, 3.0, 64.0, 1.0) for i in range(1, 60)),
        *["loading checkpoint"] * 80,
        *(megatron(40 + i, scale=2.0 ** (31 - i), skipped=1) for i in range(12)),
        *(megatron(52 + i, 3.0, 2.0**19, 1.0) for i in range(20)),
    ],
    "hysteresis": [
        *(
            line
            for e in range(14, 7, -1)
            for line in (
                "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: "
                f"{2**e}, but hysteresis is 2. Reducing hysteresis to 1",
                deepspeed(2**e, 2 ** (e - 1)),
                *(deepspeed_step(1000 * (15 - e) + i, 0) for i in ()),
            )
        ),
        *(deepspeed_step(100 * i, 14) for i in range(1, 10)),
    ],
    "overflows-hidden": [deepspeed_step(10 * i, i // 20) for i in range(1, 60)],
    "lr-moved": [
        line
        for i in range(1, 60, 3)
        for line in (
            megatron(i, 3.0, norm=1.0, lr=i / 1e5),
            megatron(i + 1, skipped=1, lr=(i + 1) / 1e5),
            megatron(i + 2, 3.0, norm=1.0, lr=(i + 2) / 1e5),
        )
    ],
    "out-of-memory": [
        *sound(20),
        "Traceback (most recent call last):",
        '  File "train.py", line 57, in <module>',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_in_a_log_is_named(kind, tmp_path):
    assert kind in kinds(tmp_path, FAULTS[kind])


@pytest.mark.parametrize("kind", ["floor", "scale-falls", "nan-applied", "norm-nonfinite"])
def test_a_grave_fault_comes_first(kind, tmp_path):
    assert kinds(tmp_path, FAULTS[kind])[0] == kind


def test_a_table_of_scales(tmp_path):
    """Nothing in it says which steps were skipped: its scale does."""

    def table(exponents):
        rows = (f"{i},{2.0**e}" for i, e in enumerate(exponents))
        return diagnose(read_log(file(tmp_path / "scale.csv", ["step,loss_scale", *rows])))

    assert table([*range(32, 16, -1), *[16] * 50]) == []  # a search
    assert table([16, 15] * 30) == []
    [finding] = table([16] * 20 + [e for e in range(16, 0, -1) for _ in range(3)])
    assert finding.kind == "scale-falls"
    assert "lowered 15 times, once in 3 steps" in finding.evidence


def test_skips_without_a_scale(tmp_path):
    lines = [deepspeed_step(10 * i, max(0, 10 * (i - 10))) for i in range(1, 40)]
    [finding, hidden] = found(tmp_path, lines)
    assert (finding.title, finding.kind) == ("Every step is skipped", "floor")
    assert "since step 101). The log does not show" in finding.evidence
    assert hidden.kind == "overflows-hidden"


def test_warnings_of_deepspeed_alone_are_no_proof_of_health(tmp_path):
    warning = (
        "[2026-11-19 21:42:17,965] [WARNING] [engine.py:2304:_sanity_check] proceed with caution"
    )
    info = warning[:26] + "[INFO] [logging.py:1:log_dist] [Rank 0] DeepSpeed info: version=1"
    sound = HEALTHY["transformers"]
    assert kinds(tmp_path, [warning, *sound]) == ["overflows-hidden"]
    assert kinds(tmp_path, [info, warning, *sound]) == []
    with pytest.raises(LogError):
        found(tmp_path, [info, warning])  # nothing of a run


def test_the_floor_of_fairseq(tmp_path):
    """Its exception, and fairseq2's message, which tries one step at ever smaller scales."""
    note = "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: {}"
    lines = [note.format(2.0**-e) for e in range(14)]
    lines += ["Traceback (most recent call last):", '  File "train.py", line 3, in main']
    lines += ["FloatingPointError: Minimum loss scale reached (0.0001). Try lowering the rate."]
    assert kinds(tmp_path, lines) == ["floor"]
    line = "Overflow detected at step 12, ignoring gradient, {}."
    fell = "decreasing loss scale from {} to {}"
    lines = [line.format(fell.format(2.0**-e, 2.0 ** (-e - 1))) for e in range(13)]
    lines += [line.format("loss scale is already at minimum (0.0001)")]
    run = read_log(file(tmp_path / "run.log", lines * 2))  # another rank, later
    assert [s.scale for s in run.steps][:14] == [2.0**-e for e in range(13)] + [0.0001]
    assert kinds(tmp_path, lines) == ["floor"]


def test_megatron_leaves_out_a_loss_that_is_nan(tmp_path):
    lines = [*sound(50), *(megatron(i, norm=NAN, scale=1.0) for i in range(51, 60))]
    [finding] = found(tmp_path, lines)
    assert (finding.severity, finding.kind, finding.steps[0]) == ("broken", "nan-applied", 51)
    assert "norm of the gradients is nan" in finding.evidence


def test_a_loss_that_is_only_printed_wrongly_is_no_catastrophe(tmp_path):
    lines = [*sound(50), megatron(51, NAN, norm=1.0), *sound(9, 52)]
    assert [(f.severity, f.kind) for f in found(tmp_path, lines)] == [("warning", "nan-applied")]


def test_what_a_log_shows_and_what_it_does_not(tmp_path):
    seen = coverage(read_log(file(tmp_path / "run.log", HEALTHY["deepspeed, a search"])))
    assert not seen.complete
    assert seen.looked[0] == "63 logged steps (deepspeed)"
    assert any("no OVERFLOW line does not mean" in text for text in seen.not_looked)
    assert any("exact number of 4 steps" in text for text in seen.not_looked)


def test_the_commands(tmp_path):
    path = str(file(tmp_path / "run.log", FAULTS["floor"]))
    other = str(file(tmp_path / "other.log", HEALTHY["megatron"]))

    def run(*words):
        return CliRunner().invoke(gradlift, list(words), catch_exceptions=False)

    doctor = run("doctor", path)
    assert doctor.exit_code == 1
    assert doctor.output.startswith("Training is broken: ")
    assert run("doctor", other).output.startswith("Nothing wrong was found in what was recorded")
    assert "300 logged steps, 0 skipped" in run("doctor", other).output
    assert "floor" in run("doctor", "--json", path).output
    assert "Training is broken" in run("report", "--text", path).output
    assert run("report", path).exit_code == 0
    assert (tmp_path / "run.log.html").stat().st_size > 10_000
    assert "300" in run("compare", path, other).output
    assert "log of megatron" in run("watch", "--once", path).output
    line = file(tmp_path / "own.log", ["s=1 l=2.5", "s=2 l=nan"])
    own = run("doctor", str(line), "--pattern", r"s=(?P<step>\d+) l=(?P<loss>\S+)")
    assert "The loss itself is not finite" in own.output
    refused = run("doctor", str(line))
    assert refused.exit_code == 2
    assert "--pattern" in refused.output
    assert "Traceback" not in refused.output
