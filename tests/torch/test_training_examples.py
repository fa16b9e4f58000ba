"""The policy-gradient example and the training benchmark: they run, learn, and measure rightly."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradlift.torch import GradScaler

ROOT = Path(__file__).parents[2]
EXAMPLE, BENCHMARK = ROOT / "examples" / "torch_rl_fp16.py", ROOT / "benchmarks" / "training.py"


@pytest.fixture(scope="module", autouse=True)
def importable():
    added = [str(EXAMPLE.parent), str(BENCHMARK.parent)]
    sys.path[:0] = added
    yield
    for folder in added:
        sys.path.remove(folder)


def run(script, folder, *options):
    """What the script printed; it ran in an empty folder, without error or warning."""
    done = subprocess.run(
        [sys.executable, str(script), *map(str, options)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "140", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def rewards(said):
    return map(float, re.search(r"held-out reward (\S+) -> (\S+)", said).groups())


# the example


def test_float16_learns_as_float32_does(tmp_path):
    half = run(EXAMPLE, tmp_path, "--steps", 80)
    single = run(EXAMPLE, tmp_path, "--steps", 80, "--dtype", "float32")
    before, after = rewards(half)
    same, reference = rewards(single)
    assert before == same < 0.2
    assert reference > before + 0.25
    assert after > reference - 0.05
    scale, skipped = re.search(r"scale 2\^(\d+), (\d+) steps", half).groups()
    assert int(scale) >= 24
    assert skipped == "0"
    assert "scale" not in single


def test_float16_without_scaling_hardly_learns(tmp_path):
    before, after = rewards(run(EXAMPLE, tmp_path, "--steps", 40, "--rule", "off"))
    assert abs(after - before) < 0.1


def test_a_classic_rule_stays_where_it_is(tmp_path):
    said = run(EXAMPLE, tmp_path, "--steps", 10, "--rule", "dynamic")
    assert "scale 2^16, 0 steps skipped" in said


def half_loss(rl, model, rollout):
    with torch.autocast("cpu", torch.float16):
        return rl.policy_loss(model, rollout)


def prepared(rl, seed=0):
    torch.manual_seed(seed)
    model = rl.make_model()
    return model, rl.make_optimizer(model), rl.make_batch(model)


def test_a_retry_is_as_if_the_first_try_had_not_been():
    import torch_rl_fp16 as rl

    model, optimizer, rollout = prepared(rl)
    scaler = GradScaler("cpu", rule="auto:init_scale=2^40")
    result = scaler.train_step(
        lambda: half_loss(rl, model, rollout), optimizer, max_norm=1.0, retries=6, model=model
    )
    assert result.stepped
    assert result.retries > 0

    other, its_optimizer, same = prepared(rl)
    assert torch.equal(same.ids, rollout.ids)
    GradScaler("cpu", rule=float(result.scale)).train_step(
        lambda: half_loss(rl, other, same), its_optimizer, max_norm=1.0
    )
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_ratios_are_one_where_nothing_moved_and_then_not():
    import torch_rl_fp16 as rl

    model, optimizer, rollout = prepared(rl)
    # With ratios of one the loss is minus the sum of the advantages, once for each symbol.
    expected = -rollout.advantages.sum() * rl.LENGTH / rl.TOKENS
    loss = rl.policy_loss(model, rollout)
    assert abs(loss - expected) < 1e-5 * rl.PROMPTS * rl.GROUP / rl.TOKENS
    loss.backward()
    optimizer.step()
    assert rl.policy_loss(model, rollout) < loss.item()


def test_groups_of_one_mind_have_exactly_zero_advantage():
    import torch_rl_fp16 as rl

    prompts, group = 300, 3  # few answers each, so that many agree on more than nothing
    rollout = rl.make_batch(prepared(rl)[0], prompts, group)
    right = rollout.ids[:, rl.LENGTH :] == rollout.ids[:, : rl.LENGTH].sort(1).values
    rewards = right.sum(1).view(prompts, group)
    of_one_mind = (rewards == rewards[:, :1]).all(1)
    assert (of_one_mind & (rewards[:, 0] > 0)).sum() > 3
    assert torch.equal((rollout.advantages.view(prompts, group) == 0).all(1), of_one_mind)


def test_no_advantage_is_no_gradient_and_no_news():
    import torch_rl_fp16 as rl

    model, optimizer, rollout = prepared(rl)
    scaler = GradScaler("cpu", rule="auto")

    def step():
        return scaler.train_step(
            lambda: half_loss(rl, model, rollout), optimizer, retries=6, model=model
        )

    step()
    scale = scaler.get_scale()
    rollout.advantages.zero_()
    result = step()
    assert result.stepped
    assert result.retries == 0
    assert all(not p.grad.any() for p in model.parameters())
    assert scaler.get_scale() == scale


# the benchmark


def test_the_benchmark_runs_and_writes(tmp_path):
    said = run(BENCHMARK, tmp_path, "--quick")
    folder = tmp_path / "build" / "training"
    written = json.loads((folder / "training.json").read_text())
    table = (folder / "table.md").read_text()
    assert list(written["tasks"]) == ["text", "digits", "recurrent", "policy", "heads"]
    for name, task in written["tasks"].items():
        assert (folder / f"{name}.svg").read_text().startswith("<?xml")
        assert f"({name}), 6 steps" in table
        assert f"({name}), 6 steps" in said
        assert len(task["runs"]) == len(task["contenders"]) == 7
        assert task["contenders"]["float32"]["flushed"] == 0
        assert task["contenders"]["float32"]["score"] is not None
        assert task["contenders"]["auto"]["flushed"] < task["contenders"]["none"]["flushed"] + 1e-9
        starts = {run["contender"]: run["losses"][0] for run in task["runs"]}
        # The same weights, the same batch: only the arithmetic differs.
        for start in starts.values():
            assert start == pytest.approx(starts["float32"], rel=0.01, abs=1e-9)
    policy = written["tasks"]["policy"]["contenders"]
    assert policy["none"]["flushed"] > 0.9 > 0.1 > policy["torch"]["flushed"]


def test_flushed_counts_what_float32_has_and_float16_has_not():
    from training import flushed

    model, twin = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    twin.weight.grad = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    model.weight.grad = torch.tensor([[1.0, 0.0], [0.0, 2.0**-24]])
    assert flushed(model, twin) == 1 / 3  # of three; the zero of both does not count


def test_verdicts_are_by_the_stated_test():
    from training import Outcome
    from training_tables import summary

    def runs(*scores):
        return [Outcome("t", "c", i, score=x, scales=[0.0]) for i, x in enumerate(scores)]

    single = runs(1.0, 2.0, 3.0)  # mean 2, deviation 1
    assert summary(runs(4.0, 4.0, 4.0), single)["within"]
    assert not summary(runs(4.0, 4.0, 4.001), single)["within"]
    assert not summary(runs(1.0, 1.0, math.inf), single)["within"]
    assert summary(runs(1.0), runs(1.0))["within"] is None


def test_the_towers_need_more_than_one_scale():
    from tasks.heads import UNITS, Heads
    from training import CONTENDERS, train

    task = Heads()
    steps = 200
    single, auto, lifted = (
        train(task, CONTENDERS[name], 0, steps) for name in ("float32", "auto", "auto + layerwise")
    )
    torch.manual_seed(0)
    first = task.parts(task.model())
    assert single.spread > 40
    assert all(single.parts[k] < first[k] / 2 for k in UNITS)
    assert all(lifted.parts[k] < first[k] / 2 for k in UNITS)
    assert auto.parts["colour"] > 0.9 * first["colour"]
    assert lifted.flushed < auto.flushed / 5


def test_the_towers_look_sane_forwards():
    from tasks.heads import UNITS, Heads, draw

    torch.manual_seed(0)
    model, seen = Heads().model(), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, args, out: seen.append(out))
    x, _ = draw(256)
    plain = model(x)
    seen.clear()
    with torch.autocast("cpu", torch.float16):
        said = model(x)
    assert len(seen) == 3 * len(UNITS)
    for out in seen:
        assert out.dtype is torch.float16
        assert 2.0**-6 < out.abs().max() < 2.0**6
        assert (out.abs() < 2.0**-14).float().mean() < 0.01
    for name in UNITS:
        assert torch.allclose(said[name], plain[name], atol=0.01)
