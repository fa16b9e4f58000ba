"""The forward pass of a bad step, made once more: what it names, what it leaves as it was, and when
it is not made."""

import logging
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradlift


class Part(nn.Module):
    """Applies a function, and counts how often it was called."""

    def __init__(self, f):
        super().__init__()
        self.f, self.calls = f, []

    def forward(self, x):
        self.calls.append(1)
        return self.f(x)


def log(x):
    return torch.log(x * 0) * 0


def net(f):
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Part(f), nn.Linear(4, 1))


@pytest.fixture
def train(tmp_path):
    """Trains on the given inputs under a recording; returns its events by kind."""

    def train(model, *inputs, between=lambda optimizer: None, factor=None, scale=None, **more):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", scale or 1.0, enabled=scale is not None)
        with gradlift.record(tmp_path / "run.jsonl", **more) as session:
            for x in inputs:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                if factor is not None:
                    by = factor()
                    loss = loss / by if isinstance(by, torch.Tensor) else loss * by
                between(optimizer)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        events = session.run.events
        assert not [e for e in events if e.detail.get("code") == "observer"]
        notes = [e.detail["text"] for e in events if e.detail.get("code") == "untraced"]
        return [(e.step, e.detail) for e in events if e.what == "origin"], notes

    return train


def line_of(f):
    return f"test_first_bad.py:{f.__code__.co_firstlineno + 1}"


def test_operation_module_value_and_line_of_a_forward_pass(train):
    [(step, origin)], _ = train(net(log), torch.randn(3, 4))
    assert (step, origin["found"], origin["where"]) == (0, "inf", "forward")
    assert (origin["module"], origin["op"], origin["input"]) == ("2", "log", "0 in the input")
    assert origin["place"].endswith(line_of(log))


@pytest.mark.parametrize("scale", [None, 1.0, 2.0**10], ids=["no scaler", "scale 1", "scale 2^10"])
def test_operation_value_and_line_of_a_backward_pass(scale, train):
    def sqrt(x):
        return x + (x * 0).sqrt()

    origins, _ = train(net(sqrt), *[torch.randn(3, 4)] * 4, scale=scale)
    step, origin = origins[0]
    assert step == (2 if scale == 2.0**10 else 0)  # a scale may be too high at first
    assert (origin["found"], origin["where"]) == ("nan", "backward") or origin["found"] == "inf"
    assert origin["op"] == "SqrtBackward0"
    assert origin["place"].endswith(line_of(sqrt))


def test_a_bad_input_and_where_in_the_batch(train):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 1)

        def forward(self, x):
            return self.body(x["first"] + x["second"])

    good, bad = torch.ones(3, 4), torch.ones(3, 4)
    bad[2, 1] = float("nan")
    [(_, origin)], _ = train(Two(), {"first": good, "second": bad})
    assert (origin["found"], origin["where"]) == ("nan", "input")
    assert origin["input"] == "input 2 of 2, 1 of 12 elements, first at [2, 1]"


def test_a_bad_buffer(train):
    model = net(lambda x: x)
    model.append(nn.BatchNorm1d(1).eval())
    model[4].running_mean.fill_(float("inf"))
    origins, _ = train(model, torch.randn(3, 4))
    assert {(o["where"], o["module"]) for _, o in origins} >= {("buffer", "4.running_mean")}


class Scaled(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", torch.tensor([factor] * 4))

    def forward(self, x):
        return x * self.factor


def test_a_buffer_that_has_become_inf(train):
    """Not the operation that makes NaN of it: that was given an inf."""

    def f(x):
        part.calls[2:] and model[3].factor.fill_(float("inf"))
        return x * 0

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Part(f), Scaled(1.0), nn.Linear(4, 1))
    part = model[2]
    [(step, origin)], _ = train(model, *[torch.randn(3, 4)] * 4, scale=1.0)
    assert (step, origin["where"], origin["module"]) == (2, "buffer", "3.factor")


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "NaN elsewhere"])
def test_a_mask_of_inf_is_meant_so(bad, train):
    class Masked(Scaled):
        def forward(self, x):
            return (x + self.factor.diag_embed()).softmax(-1)

    model = nn.Sequential(nn.Linear(4, 4), Masked(-math.inf), nn.Linear(4, 1))
    factors = iter([1.0, math.nan if bad else 1.0, 1.0])
    inputs = [torch.randn(4, 4)] * 3
    origins, _ = train(model, *inputs, factor=lambda: next(factors), scale=1.0)
    assert origins == []


@pytest.mark.parametrize("mask", [False, True])
def test_inputs_of_minus_inf_are_bad_data_unless_they_are_masks(mask, train):
    """Also if the model's output is finite, as here, and the loss is lost somewhere else."""
    given = torch.zeros(3, 4) if mask else torch.randn(3, 4)
    given[1, 2] = -math.inf
    squashes = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    origins, _ = train(squashes, given, factor=lambda: math.inf)
    inputs = [origin for _, origin in origins if origin["where"] == "input"]
    assert len(inputs) == (not mask)
    if not mask:
        assert inputs[0]["found"] == "inf"
        assert "first at [1, 2]" in inputs[0]["input"]


def test_weights_that_are_nan_poison_buffers(train):
    model = net(lambda x: x)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert train(model, *[torch.randn(3, 4)] * 3, scale=1.0)[0] == []
    assert not model[1].running_mean.isfinite().all()


def test_an_operation_between_the_model_and_the_loss(train):
    """Its own line is not known, so the line of backward() is not said to be it."""
    [(_, origin)], _ = train(net(lambda x: x), torch.randn(3, 4), factor=lambda: torch.zeros(()))
    assert (origin["found"], origin["op"]) == ("inf", "div")
    assert origin["input"] == "0 in the divisor"
    assert origin["place"] == ""
    assert "test_first_bad.py:" in origin["before"]


def test_a_mean_over_no_labels_by_hand(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradlift.record(tmp_path / "run.jsonl") as session:
        for mask in (torch.ones(3, 1), torch.zeros(3, 1)):
            optimizer.zero_grad()
            loss = (model(torch.randn(3, 4)) * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
    assert session.doctor()[0].kind == "labels-masked"


@pytest.mark.parametrize(
    "loss", [nn.functional.mse_loss, lambda p, y: (p.float() - y["wanted"]).square().sum(1).mean()]
)
def test_a_bad_target_is_named(loss, tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = {"given": torch.randn(3, 4), "wanted": torch.randn(3, 2)}
    other = torch.full((3, 2), math.nan)
    batch["wanted"][2, 1] = math.nan
    with gradlift.record(tmp_path / "run.jsonl") as session:
        out = model(batch["given"])
        made = loss(out, batch["wanted"] if loss is nn.functional.mse_loss else batch)
        made.backward()
        optimizer.step()
    [origin] = [e.detail for e in session.run.events if e.what == "origin"]
    assert other.isnan().all()
    assert origin["where"] == "input"
    assert origin["input"] == "batch['wanted'], 1 of 6 elements, first at [2, 1]"
    [finding, *_] = session.doctor()
    assert finding.kind == "bad-data"
    assert "the loss was given nan: batch['wanted']" in finding.evidence


def test_a_buffer_that_the_bad_pass_itself_poisoned_is_not_blamed(train):
    model = net(log).append(nn.BatchNorm1d(1))
    [(_, origin)], _ = train(model, torch.randn(3, 4))
    assert not model[4].running_mean.isfinite().any()
    assert origin["op"] == "log"


def test_everything_is_as_it_was(train, capsys, caplog):
    """Also what backward needs: batch norm's graph holds its buffers."""

    def odd(x):
        print("forward")
        logging.getLogger("odd").error("logged")
        norm.kept = torch.rand(2) * random.random() * np.random.rand()
        norm.count = getattr(norm, "count", 0) + 1
        norm.register_buffer("late", norm.late + 1)
        return log(x)

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    model = net(odd)
    norm = model[1]
    norm.register_buffer("late", torch.zeros(()))
    before = {}

    def between(_):
        before.update(vars(norm), buffers=dict(norm._buffers), random=states())
        before["values"] = {name: b.clone() for name, b in norm._buffers.items()}
        before["versions"] = {name: b._version for name, b in norm._buffers.items()}

    def after(_):  # a hook of the graph: runs in the backward pass, after the search
        assert len(model[2].calls) == 2
        assert states() == before["random"]
        assert norm.kept is before["kept"]
        assert norm.count == 1
        assert vars(norm).keys() == before.keys() - {"buffers", "random", "values", "versions"}
        assert all(norm._buffers[name] is b for name, b in before["buffers"].items())
        assert {name: b._version for name, b in norm._buffers.items()} == before["versions"]
        assert all(torch.equal(norm._buffers[name], b) for name, b in before["values"].items())
        checked.append(1)

    checked = []
    model[3].weight.register_hook(after)
    origins, _ = train(model, torch.randn(3, 4), between=between)
    assert origins
    assert checked
    assert capsys.readouterr().out == "forward\n"
    assert caplog.messages == ["logged"]


def test_what_other_threads_print_meanwhile_is_not_lost(train, capsys):
    import threading

    def prints(x):
        thread = threading.Thread(target=lambda: print("other thread"))
        thread.start()
        thread.join()
        print("this one")
        return log(x)

    train(net(prints), torch.randn(3, 4))
    assert capsys.readouterr().out.splitlines() == ["other thread", "this one", "other thread"]


def test_never_a_second_time_for_the_same_cause(train):
    model = net(log)
    origins, _ = train(model, *[torch.randn(3, 4)] * 8, scale=1.0)
    assert len(origins) == 1
    assert len(model[2].calls) == 8 + 1


def test_another_cause_is_searched_for(train):
    def either(x):
        return (x * 0).rsqrt() if len(part.calls) > 5 else log(x) if len(part.calls) < 4 else x

    model = net(either)
    part = model[2]
    origins, _ = train(model, *[torch.randn(3, 4)] * 8, scale=1.0)
    assert [o["op"] for _, o in origins] == ["log", "rsqrt"]


def test_not_at_all_if_it_is_switched_off(train):
    model = net(log)
    origins, notes = train(model, *[torch.randn(3, 4)] * 4, scale=1.0, rerun=False)
    assert origins == []
    assert notes == ["the forward pass was not run again: that was switched off"]
    assert len(model[2].calls) == 4


def test_not_when_an_input_is_no_longer_what_it_was(train):
    model, x = nn.Sequential(Part(lambda x: x + 0), *net(log)), torch.randn(3, 4)
    _, notes = train(model, x, between=lambda _: x.mul_(2))
    assert len(model[0].calls) == 1
    assert notes == ["the forward pass was not run again: an input was changed in place since"]


def test_not_when_weights_are_no_longer_what_they_were(train):
    model, x = net(log), torch.randn(3, 4)

    def stepped(optimizer):
        model[0].bias.grad = torch.ones(4)
        with torch.no_grad():
            optimizer.step()

    train(model, x, between=stepped)
    assert len(model[2].calls) == 1
    other = nn.Parameter(torch.ones(1, requires_grad=True))
    other.grad = torch.ones(1)
    model = net(log)
    train(model, x, between=lambda _: torch.optim.SGD([other], lr=0.1).step())
    assert len(model[2].calls) == 2  # another optimizer's weights


def test_not_where_other_ranks_take_part(train):
    model = net(log).append(nn.SyncBatchNorm(1))
    _, notes = train(model, torch.randn(3, 4))
    assert len(model[2].calls) == 1
    assert "SyncBatchNorm" in notes[0]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["FSDP1", "FSDP2", "tensor parallel", "DDP"])
def test_not_where_weights_are_spread_over_ranks(way, one_rank, train):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = net(log)
    part = model[2]
    if way == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif way == "FSDP2":
        fully_shard(model, mesh=one_rank)
    elif way == "tensor parallel":
        model[1] = nn.Identity()
        parallelize_module(model[0], one_rank, ColwiseParallel())
    else:
        model = nn.parallel.DistributedDataParallel(model)
    origins, notes = train(model, torch.randn(3, 4))
    assert len(part.calls) == (2 if way == "DDP" else 1)  # each rank has a whole model there
    if way == "DDP":
        assert origins[0][1]["op"] == "log"
    else:
        wanted = {"FSDP1": "FullySharded", "FSDP2": "FSDPModule"}.get(way, "spread over ranks")
        assert any(wanted in note for note in notes)


def test_not_in_a_stage_of_a_pipeline(one_rank, tmp_path):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = net(log)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, y: (out - y).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradlift.record(tmp_path / "run.jsonl") as session:
        schedule.step(torch.randn(6, 4), target=torch.zeros(6, 1))
        optimizer.step()
    assert len(model[2].calls) == 1 + 2  # to learn shapes; micro-batches
    notes = [e.detail for e in session.run.events if e.detail.get("code") == "untraced"]
    assert "a stage of a pipeline" in notes[0]["text"]


def test_what_gradlift_calls_itself_is_not_in_the_order_of_calls(tmp_path):
    """The backward pass of a script's third bad step is run again, within autocast."""
    model = net(lambda x: (x * 0).sqrt())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", 2.0)
    with gradlift.record(tmp_path / "run.jsonl") as session:
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 4)).float().abs().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert session.run.skipped == 6
    assert [e for e in session.run.events if e.what == "origin"]
    wanted = ("zero_grad", "autocast", "scale", "backward", "scaler.step", "update")
    assert {tuple(call.name for call in calls.order) for calls in session.run.calls} == {wanted}
