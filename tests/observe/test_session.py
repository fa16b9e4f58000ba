"""`gradlift.record`: a block of code, recorded; and what `gradlift run` says of other scripts."""

import subprocess
import sys

import pytest
from observe.running import PYTHON, SMALL, gradlift, recorded

import gradlift as package
from gradlift import read_journal
from gradlift.errors import SettingsError


def test_a_session_has_the_run_its_findings_and_a_page(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with package.record() as session:
        for _ in range(30):
            optimizer.zero_grad()
            (model(torch.randn(2, 4)).mean() * float("nan")).backward()
            optimizer.step()
    assert len(session.run.steps) == 30
    assert session.path.parent.parent == tmp_path / "gradlift-runs"
    assert "<html" in session.report().read_text()
    assert session.report(tmp_path / "page.html") == tmp_path / "page.html"
    findings = session.doctor()
    assert str(findings) == repr(findings)
    assert all(f.title in str(findings) for f in findings)


def test_gradlifts_own_scaler_is_recorded_beside_its_own_journal(tmp_path):
    import torch

    from gradlift.torch import GradScaler

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with package.record(tmp_path / "run.jsonl", rule="static:4") as session:
        scaler = GradScaler("cpu", init_scale=2.0**10, journal=tmp_path / "own.jsonl")
        theirs = torch.amp.GradScaler("cpu", 2.0**10)
        for each in (scaler, theirs):
            each.scale(model(torch.ones(1, 4)).mean()).backward()
            each.step(optimizer)
            each.update()
    assert [(s.key, s.scale) for s in session.run.steps] == [("", 4.0), ("scaler 2", 4.0)]
    assert [s.scale for s in read_journal(tmp_path / "own.jsonl").steps] == [4.0]
    assert type(theirs).__mro__[1] is GradScaler
    assert type(torch.amp.GradScaler("cpu")).__mro__[1] is object


def test_misuse(tmp_path):
    with pytest.raises(SettingsError, match="no rule is called"):
        package.record(tmp_path / "a.jsonl", rule="nonsense")


def test_a_session_inside_another_records_by_itself(tmp_path):
    import torch

    w = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step():
        w.sum().backward()
        optimizer.step()

    with package.record(tmp_path / "outer.jsonl") as outer:
        step()
        with package.record(tmp_path / "inner.jsonl") as inner:
            step(), step()
        step()
    assert (len(outer.run.steps), len(inner.run.steps)) == (2, 2)
    (note,) = [e for e in outer.run.events if e.what == "note"]
    assert "inner.jsonl" in note.detail["text"]
    assert package.journal.current() is None


def test_importing_gradlift_stays_light():
    code = (
        "import sys, gradlift; print('gradlift.session' in sys.modules, gradlift.record.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False record\n"


def notes(folder):
    events = read_journal(recorded(folder)).events
    return {e.detail["code"]: e.detail["text"] for e in events if e.what == "note"}


SENTENCES = {
    "never steps": ("import torch\ntorch.ones(2).sum()\n", "no optimizer stepped"),
    "disabled": (
        SMALL.replace('"cpu", init_scale', "enabled=False, init_scale") + "step()\n",
        "GradScaler is disabled: nothing is scaled",
    ),
    "no CUDA": (SMALL.replace('"cpu", ', "") + "step()\n", "GradScaler is disabled"),
    "jax": ("import jax\nprint(jax.numpy.ones(2).sum())\n", "gradlift.jax.log(None, result, step)"),
    "keras": (
        "import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\nprint(1)\n",
        "callbacks=[ScaleLogger()]",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_one_sentence_says_what_was_seen(case, tmp_path):
    script, sentence = SENTENCES[case]
    (tmp_path / "train.py").write_text(script)
    plain = gradlift("train.py", cwd=tmp_path, by=PYTHON)
    done = gradlift("run", "train.py", cwd=tmp_path)
    assert (done.returncode, done.out) == (0, plain.out), done.err
    assert sentence in done.err
    run = read_journal(recorded(tmp_path))
    if case in ("disabled", "no CUDA"):
        assert len(run.steps) == 1
        assert run.header["rule"] == "off"
        assert "scale" in done.err.split(sentence)[1]  # which static scale would fit
    else:
        assert sentence in notes(tmp_path)["nothing"]
        assert not run.steps


def test_a_script_that_crashes_is_recorded(tmp_path):
    (tmp_path / "train.py").write_text(SMALL + "step()\nstep()\nraise ValueError('broken data')\n")
    done = gradlift("run", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    run = read_journal(recorded(tmp_path))
    assert len(run.steps) == 2
    [end] = [e.detail for e in run.events if e.what == "end"]
    assert (end["how"], end["type"], end["message"]) == ("exception", "ValueError", "broken data")
    assert end["frames"][-1][0] == "train.py:15"
    assert "ended by ValueError: broken data" in done.err
    assert "broken  The script ended by ValueError  train.py:15" in done.err
