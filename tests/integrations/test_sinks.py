"""Sinks, each read back with the real tool."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gradlift import Journal, Verdict, read_journal
from gradlift.errors import GradliftError
from gradlift.integrations import MLflow, TensorBoard, WandB
from gradlift.journal import Step

SHARES = {
    "elements": 8,
    "zero": 0.25,
    "subnormal": 0.5,
    "near_max": 0.0,
    "exponents": {-20: 3, -18: 2, 4: 1},
}
OTHER = {"elements": 4, "zero": 0.75, "subnormal": 0.0, "near_max": 0.125, "exponents": {0: 1}}
DEAD = {"elements": 4, "zero": 1.0, "subnormal": 0.0, "near_max": 0.0, "exponents": {}}
WORST = {"worst_zero": 1.0, "worst_subnormal": 0.5, "worst_near_max": 0.125}

# step 0 is good, 1 overflows, 2 is good and knows little, then another loss skips one
CHARTS = {
    "scale_log2": [(0, 10.0), (1, 10.0), (2, 9.0)],
    "skipped": [(0, 0.0), (1, 1.0), (2, 1.0)],
    "loss": [(0, 0.25), (1, 0.5)],
    "grad_norm": [(0, 0.75)],
    "amax": [(0, 2047.0)],
    "headroom_bits": [(0, 5.0)],
    "lr": [(0, 0.125), (1, 0.125)],
    "critic/scale_log2": [(2, -3.0)],
    "critic/skipped": [(2, 1.0)],
}


def record(path, also):
    with Journal(path, also=also) as journal:
        journal.describe(rule="auto", framework="torch", parameters={"w": 8, "b": 4})
        journal.sample(0, {"w": SHARES, "b": OTHER, "dead": DEAD})
        journal.step(Step(0, 1024.0, 1024.0, amax=2047.0, loss=0.25, norm=0.75, lr=0.125))
        journal.event("skip", 1, cause="OVERFLOW", culprits=["w (inf)"])
        journal.step(
            Step(
                *(1, 1024.0, 512.0, math.inf, True),
                loss=0.5,
                lr=0.125,
                verdict=Verdict.SKIP,
                culprits=("w",),
            )
        )
        journal.step(Step(2, 512.0, 512.0, loss=math.inf))
        journal.step(Step(2, 0.125, 0.125, verdict=Verdict.SKIP, key="critic"))
        journal.event("note", text="a | b")


@pytest.fixture(autouse=True)
def nothing_leaves_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


# TensorBoard


def accumulated(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_tensorboard_has_every_number(tmp_path):
    record("run.jsonl", [TensorBoard(tmp_path / "board")])
    found = accumulated(tmp_path / "board")
    scalars = {
        tag.removeprefix("gradlift/"): [(e.step, e.value) for e in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    assert scalars == {**CHARTS, **{name: [(0, value)] for name, value in WORST.items()}}


def test_tensorboard_has_histograms_of_exponents(tmp_path):
    record("run.jsonl", [TensorBoard(tmp_path / "board")])
    found = accumulated(tmp_path / "board")
    assert set(found.Tags()["histograms"]) == {"gradlift/exponents/w", "gradlift/exponents/b"}
    (event,) = found.Histograms("gradlift/exponents/w")
    value = event.histogram_value
    assert event.step == 0
    assert (value.num, value.min, value.max) == (6, -20, 5)
    assert (value.sum, value.sum_squares) == (3 * -20 + 2 * -18 + 4, 3 * 400 + 2 * 324 + 16)
    below = dict(zip(value.bucket_limit, value.bucket, strict=True))
    assert {limit: n for limit, n in below.items() if n} == {-19: 3, -17: 2, 5: 1}
    assert list(below) == list(range(-20, 6))


def test_tensorboard_has_facts_and_events_as_text(tmp_path):
    record("run.jsonl", [TensorBoard(tmp_path / "board")])
    found = accumulated(tmp_path / "board")
    text = {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }
    assert text["gradlift/events"] == [
        (1, "**skip** cause: OVERFLOW, culprits: ['w (inf)']"),
        (2, r"**note** text: a \| b"),
    ]
    assert "| rule | auto |\n" in text["gradlift/run"][0][1]
    assert "| parameters | 2 |" in text["gradlift/run"][0][1]
    metadata = found.SummaryMetadata("gradlift/events")
    assert metadata.plugin_data.plugin_name == "text"


# Weights & Biases


def records(path):
    """An offline run's records: blocks of 32 KiB, each chunk with checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = Path(path).read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def offline_runs(folder):
    import wandb

    wandb.teardown()  # finish() may return before its service has written the last of a file
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def history(path):
    """What was logged, row by row."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }


def test_wandb_offline_has_every_number(tmp_path):
    record("run.jsonl", [WandB(project="test", dir=tmp_path)])
    (path,) = offline_runs(tmp_path)
    rows = list(history(path))
    charts = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("gradlift/") and "exponents" not in name:
                chart = charts.setdefault(name.removeprefix("gradlift/"), [])
                chart.append((row["gradlift/step"], value))
    assert charts.pop("step")
    assert charts.pop("events/skip") == [(1, 1)]
    assert charts.pop("events/note") == [(2, 1)]
    assert charts == {**CHARTS, **{name: [(0, value)] for name, value in WORST.items()}}
    assert [row["gradlift/step"] for row in rows] == [0, 0, 1, 1, 2, 2, 2]


def test_wandb_offline_has_histograms_and_facts(tmp_path):
    record("run.jsonl", [WandB(project="test", dir=tmp_path)])
    (path,) = offline_runs(tmp_path)
    first = next(history(path))
    assert not any(name.startswith("gradlift/exponents/dead") for name in first)
    kind, edges, counts = (
        first[f"gradlift/exponents/w/{part}"] for part in ("_type", "bins", "values")
    )
    assert (kind, edges) == ("histogram", list(range(-20, 6)))
    assert {e: n for e, n in zip(edges, counts) if n} == {-20: 3, -18: 2, 4: 1}
    config = [
        json.loads(item.value_json)
        for r in records(path)
        for item in r.config.update
        if item.key == "gradlift"
    ]
    assert (config[0]["rule"], config[0]["parameters"]) == ("auto", 2)
    axes = [r.metric for r in records(path) if r.WhichOneof("record_type") == "metric"]
    assert ("gradlift/*", "gradlift/step") in [(m.glob_name, m.step_metric) for m in axes]
    assert any(r.WhichOneof("record_type") == "exit" for r in records(path))


@pytest.mark.parametrize("own_steps", [False, True])
def test_in_a_run_of_the_user_numbers_ride_along(own_steps, tmp_path):
    import wandb

    run = wandb.init(project="test", dir=tmp_path)
    with Journal("run.jsonl", also=[WandB()]) as journal:
        for i in range(6):
            journal.step(Step(i, 8.0, 8.0, loss=i / 4))
            if i % 3 == 2:
                run.log({"mine": i}, step=i // 3 if own_steps else None)
    assert wandb.run is run  # not finished by the sink
    run.finish()
    (path,) = offline_runs(tmp_path)
    rows = list(history(path))
    assert [(row["_step"], row["mine"]) for row in rows] == [(0, 2), (1, 5)]
    # W&B holds a step that was given back until the next one comes: what is logged joins it
    ours = [(row["gradlift/step"], row["gradlift/loss"]) for row in rows if "gradlift/step" in row]
    assert ours == ([(5, 1.25)] if own_steps else [(2, 0.5), (5, 1.25)])


# MLflow


def metrics(client, run_id):
    return {
        name.removeprefix("gradlift/"): [
            (m.step, m.value) for m in client.get_metric_history(run_id, name)
        ]
        for name in client.get_run(run_id).data.metrics
    }


def test_mlflow_store_has_every_number(tmp_path):
    from mlflow import MlflowClient

    sink = MLflow(tracking_uri=(tmp_path / "store").as_uri(), experiment="test")
    record("run.jsonl", [sink])
    client = MlflowClient((tmp_path / "store").as_uri())
    found = metrics(client, sink.run_id)
    assert found.pop("events/skip") == [(1, 1.0)]
    assert found.pop("events/note") == [(2, 1.0)]
    assert found == {**CHARTS, **{name: [(0, value)] for name, value in WORST.items()}}
    run = client.get_run(sink.run_id)
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "test"
    assert (run.data.tags["gradlift.rule"], run.data.tags["gradlift.parameters"]) == ("auto", "2")


def test_mlflow_takes_more_than_one_batch(tmp_path):
    from mlflow import MlflowClient

    uri = (tmp_path / "store").as_uri()
    sink = MLflow(tracking_uri=uri)
    with Journal("run.jsonl", also=[sink]) as journal:
        for i in range(700):
            journal.step(Step(i, 8.0, 8.0, loss=0.5, key="a:b"))
    found = metrics(MlflowClient(uri), sink.run_id)
    assert found["a_b/loss"] == [(i, 0.5) for i in range(700)]
    assert len(found["a_b/scale_log2"]) == 700


def test_a_second_run_joins_the_experiment_and_a_given_run_stays_open(tmp_path):
    from mlflow import MlflowClient

    uri = (tmp_path / "store").as_uri()
    client = MlflowClient(uri)
    first, second = (MLflow(tracking_uri=uri, experiment="shared") for _ in range(2))
    record("first.jsonl", [first])
    record("second.jsonl", [second])
    where = client.get_experiment_by_name("shared").experiment_id
    assert {r.info.run_id for r in client.search_runs([where])} == {first.run_id, second.run_id}
    given = client.create_run(where).info.run_id
    record("third.jsonl", [MLflow(given, tracking_uri=uri)])
    assert client.get_run(given).info.status == "RUNNING"
    assert metrics(client, given)["loss"] == CHARTS["loss"]


# Together, and what can go wrong


def test_all_sinks_beside_one_journal(tmp_path):
    sinks = [
        TensorBoard(tmp_path / "board"),
        WandB(project="test", dir=tmp_path),
        MLflow(tracking_uri=(tmp_path / "store").as_uri()),
    ]
    record("run.jsonl", sinks)
    assert len(read_journal("run.jsonl").steps) == 4
    assert len(accumulated(tmp_path / "board").Scalars("gradlift/scale_log2")) == 3


def test_a_store_that_cannot_be_reached_does_not_stop_training(tmp_path):
    (tmp_path / "store").write_text("not a folder")
    with pytest.warns(UserWarning, match="MLflow gets no more records of this run"):
        record("run.jsonl", [MLflow(tracking_uri=(tmp_path / "store").as_uri())])
    assert len(read_journal("run.jsonl").steps) == 4


@pytest.mark.parametrize(
    ("make", "package"),
    [(lambda: TensorBoard("x"), "tensorboard"), (WandB, "wandb"), (MLflow, "mlflow")],
    ids=["tensorboard", "wandb", "mlflow"],
)
def test_a_missing_package_is_one_line(make, package, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(GradliftError, match=f"pip install {package}$") as error:
        make()
    assert "\n" not in str(error.value)


def test_importing_the_sinks_imports_none_of_their_packages():
    code = (
        "import gradlift.integrations, sys\n"
        "print(*({'tensorboard', 'wandb', 'mlflow', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "")
