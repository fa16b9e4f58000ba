"""gradlift.apex: apex's amp and fp16_utils, told as stories with exact numbers."""

import copy
import dataclasses
import doctest
import importlib
import inspect
import io
import pickle
import pkgutil
import types
import warnings

import pytest
import torch
from torch import nn

import gradlift.apex
from gradlift import Cause, GradliftError, Journal, Verdict, read_journal
from gradlift.apex import amp
from gradlift.apex.guard import guard_of
from gradlift.apex.optimizers import FusedAdam, FusedSGD
from gradlift.apex.parallel import DistributedDataParallel
from gradlift.errors import MisuseError, SettingsError, StateError
from gradlift.rules import Backoff
from gradlift.torch import GradScaler, MasterWeights, half_model

PACKAGE = gradlift.apex
REFUSED = f"{PACKAGE.__name__}.transformer"
MODULES = [m.name for m in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
MODULES.remove(REFUSED)
LINE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"
HUGE = 1e37  # a finite loss, whose gradient leaves float32 when it is scaled
UP = 2.0**-4  # a gradient that a scale of 2^16 just carries through float16


@pytest.mark.parametrize("name", [PACKAGE.__name__, *MODULES])
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


PUBLIC = ["amp", "fp16_utils", "multi_tensor_apply", "optimizers", "parallel"]
PUBLIC += ["normalization", "normalization.fused_layer_norm"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_docstring_with_an_example(name):
    module = importlib.import_module(f"{PACKAGE.__name__}.{name}")
    for public in module.__all__:
        thing = getattr(module, public)
        if callable(thing) and thing.__module__.startswith("gradlift"):
            assert ">>>" in thing.__doc__, public


def test_arguments_come_in_apexs_order():
    def names(function):
        arguments = inspect.signature(function).parameters.values()
        return " ".join(a.name for a in arguments if a.kind is not a.KEYWORD_ONLY)

    assert names(amp.initialize) == (
        "models optimizers enabled opt_level cast_model_type patch_torch_functions "
        "keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity "
        "min_loss_scale max_loss_scale"
    )
    assert names(amp.scale_loss) == (
        "loss optimizers loss_id model delay_unscale delay_overflow_check"
    )
    assert inspect.signature(amp.initialize).parameters["max_loss_scale"].default == 2.0**24


class Weight(nn.Module):
    """loss(x) = w * x, so that the gradient is x."""

    def __init__(self, *values):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values or (0.0,)))

    def forward(self, x):
        return (self.w * x).sum()


def start(*values, lr=1.0, **settings):
    model = Weight(*values)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=lr), **settings)


def several(n):
    models = [Weight() for _ in range(n)]
    return amp.initialize(models, [torch.optim.SGD(m.parameters(), lr=1.0) for m in models])


def backward(model, optimizer, x, **how):
    loss = model.w.float().mul(x).sum()
    with amp.scale_loss(loss, optimizer, **how) as scaled_loss:
        scaled_loss.backward()


def state(loss_id=0):
    return tuple(amp.state_dict()[f"loss_scaler{loss_id}"].values())


# One loss, one optimizer


def test_three_good_steps_one_overflow_one_good_step(capsys):
    model, optimizer = start()
    seen = []
    for x in (1.0, 2.0, 3.0, HUGE, 4.0):
        optimizer.zero_grad()
        backward(model, optimizer, x)
        optimizer.step()
        seen.append((model.w.item(), *state()))
    assert seen == [
        (-1.0, 2.0**16, 1),
        (-3.0, 2.0**16, 2),
        (-6.0, 2.0**16, 3),
        (-6.0, 2.0**15, 0),
        (-10.0, 2.0**15, 1),
    ]
    assert capsys.readouterr().out == LINE.format(0, 32768.0)


def test_the_scale_doubles_after_2000_passes_and_stays_in_its_bounds():
    model, optimizer = start(min_loss_scale=2.0**15, max_loss_scale=2.0**17)
    scales = []
    for unskipped, x in ((1998, 1.0), (1999, 1.0), (1999, 1.0), (0, HUGE), (0, HUGE), (0, HUGE)):
        scale = state()[0]
        amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": unskipped}})
        backward(model, optimizer, x)
        scales.append(state()[0])
    assert scales == [2.0**n for n in (16, 17, 17, 16, 15, 15)]


def test_gradients_are_true_after_the_block_and_can_be_clipped():
    model, optimizer = start(0.0, 0.0)
    backward(model, optimizer, torch.tensor([3.0, 4.0]))
    assert model.w.grad.tolist() == [3.0, 4.0]
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.5)
    assert norm == 5.0
    optimizer.step()
    assert model.w.tolist() == pytest.approx([-1.5, -2.0])


def test_master_gradients_are_float32_and_what_is_done_to_them_counts():
    model, optimizer = start(1.0, 1.0, opt_level="O2")
    tiny = 2.0**-30  # nothing in float16, something once scaled
    backward(model, optimizer, torch.tensor([tiny, 0.0]))
    (master,) = amp.master_params(optimizer)
    assert master.dtype == torch.float32
    assert master.grad.tolist() == [tiny, 0.0]
    master.grad.mul_(2.0**20)
    optimizer.step()
    (master,) = amp.master_params(optimizer)
    assert master.tolist() == [1 - 2.0**-10, 1.0]
    assert model.w.dtype == torch.float16


def test_a_loss_that_is_not_finite_keeps_the_scale_and_is_named(capsys):
    model, optimizer = start()
    backward(model, optimizer, float("nan"))
    optimizer.step()
    assert model.w.item() == 0.0
    assert state() == (2.0**16, 0)
    said = "Loss is not finite.  Skipping step, loss scaler 0 keeping loss scale 65536.0\n"
    assert capsys.readouterr().out == said


def test_verbosity_0_says_nothing(capsys):
    model, optimizer = start(verbosity=0)
    backward(model, optimizer, HUGE)
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert state()[0] == 2.0**15


# Accumulation


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_passes_with_different_scales_add_up(level):
    model, optimizer = start(opt_level=level, loss_scale="dynamic")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1998}})
    small = 2.0**-18  # lost beside 2^-4 in float16
    scales = []
    for x in (UP, small, small):
        scales.append(state()[0])
        backward(model, optimizer, x)
    assert scales == [2.0**16, 2.0**16, 2.0**17]
    (weight,) = amp.master_params(optimizer)
    assert weight.grad.item() == UP + 2 * small
    optimizer.step()
    (weight,) = amp.master_params(optimizer)
    assert weight.item() == -(UP + 2 * small)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_any_pass_skips_the_step_and_only_lowers_the_scale_once(level, capsys):
    model, optimizer = start(opt_level=level)
    for x in (UP, HUGE if level == "O1" else 8.0, UP):
        backward(model, optimizer, x)
    assert state() == (2.0**15, 1)
    assert capsys.readouterr().out == ""  # not before it is skipped
    optimizer.step()
    assert capsys.readouterr().out == LINE.format(0, 32768.0)
    optimizer.zero_grad()
    backward(model, optimizer, UP)
    optimizer.step()
    assert model.w.item() == -UP
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_parameters_that_only_some_passes_reach(level):
    model = nn.ModuleList([Weight(), Weight()])
    a, b = model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    for net, x in ((a, 1.0), (b, 2.0), (b, 4.0)):
        backward(net, optimizer, x * 2.0**-6)
    optimizer.step()
    assert [a.w.item(), b.w.item()] == [-(2.0**-6), -6 * 2.0**-6]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_of_either_drops_earlier_passes(level, to_none, whose):
    model, optimizer = start(opt_level=level)
    backward(model, optimizer, UP)
    (model if whose == "model" else optimizer).zero_grad(set_to_none=to_none)
    backward(model, optimizer, UP / 2)
    optimizer.step()
    assert model.w.item() == -UP / 2


def test_zero_grad_drops_an_overflow_with_its_gradients(capsys):
    model, optimizer = start()
    backward(model, optimizer, HUGE)
    optimizer.zero_grad()  # the script saw it, and leaves this batch out by itself
    backward(model, optimizer, 1.0)
    optimizer.step()
    assert (model.w.item(), state()) == (-1.0, (2.0**15, 1))
    assert capsys.readouterr().out == ""


def test_zero_grad_inside_the_block():
    model, optimizer = start()
    for _ in range(2):
        with amp.scale_loss(model(1.0), optimizer) as scaled_loss:
            optimizer.zero_grad()
            scaled_loss.backward()
    assert model.w.grad.item() == 1.0


def test_a_gradient_that_lies_in_a_bucket_is_not_overwritten():
    model, optimizer = start()
    bucket = torch.tensor([5.0, 0.0])
    model.w.grad = bucket[:1]
    with amp.scale_loss(model(2.0), optimizer) as scaled_loss:
        bucket.zero_()  # as the next backward of DistributedDataParallel does
        scaled_loss.backward()
    assert model.w.grad.item() == 7.0


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("views", [True, False])
def test_passes_add_up_under_distributed_data_parallel(level, views, process_group):
    model, optimizer = start(opt_level=level, max_loss_scale=2.0**12)  # its loss is float16 in O2
    if views:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        wrapped = DistributedDataParallel(model, delay_allreduce=True)
    for x in (UP, UP / 2, 2.0**-18):
        with amp.scale_loss(wrapped(torch.tensor(x)), optimizer) as scaled_loss:
            scaled_loss.backward()
    (weight,) = amp.master_params(optimizer)
    assert weight.grad.item() == UP * 1.5 + 2.0**-18


def test_sparse_gradients_add_up():
    table = nn.Embedding(4, 1, sparse=True)
    before = table.weight.detach().clone()
    table, optimizer = amp.initialize(table, torch.optim.SGD(table.parameters(), lr=1.0))
    for ids in ([0, 1, 1], [1, 3]):
        with amp.scale_loss(table(torch.tensor(ids)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert torch.equal(table.weight, before - torch.tensor([[1.0], [3.0], [0.0], [1.0]]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_the_block_puts_the_gradients_back(level):
    model, optimizer = start(opt_level=level)
    exact = 2.0**-4 + 2.0**-18
    backward(model, optimizer, UP)
    backward(model, optimizer, 2.0**-18)
    with pytest.raises(ValueError, match="mine"):  # noqa: SIM117
        with amp.scale_loss(model(UP), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise ValueError("mine")
    (weight,) = amp.master_params(optimizer)
    assert weight.grad.item() == exact
    backward(model, optimizer, UP)
    (weight,) = amp.master_params(optimizer)
    assert weight.grad.item() == exact + UP


def test_what_a_given_up_loss_was_is_forgotten(capsys):
    model, optimizer = start()
    with pytest.raises(ValueError, match="mine"):  # noqa: SIM117
        with amp.scale_loss(model(float("nan")), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise ValueError("mine")
    backward(model, optimizer, float("nan"), delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer, HUGE)
    optimizer.step()
    assert capsys.readouterr().out == LINE.format(0, 32768.0)


# delay_unscale


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_passes_are_unscaled_together(level):
    model, optimizer = start(opt_level=level)
    backward(model, optimizer, UP / 8)  # true, and laid aside
    backward(model, optimizer, UP / 4, delay_unscale=True)
    assert model.w.grad.item() == UP / 4 * 2.0**16
    assert state() == (2.0**16, 1)
    backward(model, optimizer, UP / 2)
    assert state() == (2.0**16, 2)
    optimizer.step()
    assert model.w.item() == -UP * 7 / 8


def test_a_step_right_after_a_delayed_pass():
    model, optimizer = start()
    backward(model, optimizer, 3.0, delay_unscale=True)
    optimizer.step()
    assert model.w.item() == -3.0
    backward(model, optimizer, 1.0, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer, 2.0, delay_unscale=True)
    (weight,) = amp.master_params(optimizer)
    assert weight.grad.item() == 2.0


def test_a_delayed_pass_of_another_loss_has_another_scale():
    model, optimizer = start(num_losses=2)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 2.0**4, "unskipped": 0},
            "loss_scaler1": {"loss_scale": 2.0**9, "unskipped": 0},
        }
    )
    backward(model, optimizer, 1.0, loss_id=0, delay_unscale=True)
    backward(model, optimizer, 2.0, loss_id=1)
    assert model.w.grad.item() == 3.0


def test_no_gradient_keeps_a_scale_that_has_moved():
    models, optimizers = several(2)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1999}})
    backward(models[0], optimizers, 3.0, delay_unscale=True)
    backward(models[1], optimizers[1], 5.0)  # the scale doubles here
    assert state()[0] == 2.0**17
    for optimizer in optimizers:
        optimizer.step()
    assert [m.w.item() for m in models] == [-3.0, -5.0]


def test_a_state_is_loaded_over_a_delayed_pass():
    model, optimizer = start()
    backward(model, optimizer, 3.0, delay_unscale=True)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    optimizer.step()
    assert model.w.item() == -3.0


def test_an_overflow_elsewhere_does_not_stop_a_delayed_pass(capsys):
    models, optimizers = several(3)
    backward(models[0], optimizers[0], 1.0, delay_unscale=True)
    with amp.scale_loss(models[1](HUGE) + models[2](1.0), optimizers[1:], delay_unscale=True) as s:
        s.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [m.w.item() for m in models] == [-1.0, 0.0, 0.0]
    assert capsys.readouterr().out == LINE.format(0, 32768.0)


# Several losses and optimizers


def test_each_loss_has_a_scale_and_each_overflow_is_printed_once(capsys):
    model, optimizer = start(num_losses=3)
    for loss_id, x in enumerate((HUGE, 1.0, HUGE)):
        backward(model, optimizer, x, loss_id=loss_id)
    optimizer.step()
    optimizer.step()  # the marks are gone; these gradients are what they are
    assert [state(i) for i in range(3)] == [(2.0**15, 0), (2.0**16, 1), (2.0**15, 0)]
    assert capsys.readouterr().out == LINE.format(0, 32768.0) + LINE.format(2, 32768.0)


def test_one_bad_optimizer_of_a_pass_stops_all_of_them_and_no_other(capsys):
    models, optimizers = several(3)
    loss = models[0](HUGE) + models[1](1.0)
    with amp.scale_loss(loss, optimizers[:2]) as scaled_loss:
        scaled_loss.backward()
    backward(models[2], optimizers[2], 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert [m.w.item() for m in models] == [0.0, 0.0, -1.0]
    assert capsys.readouterr().out == LINE.format(0, 32768.0)


def test_an_optimizer_without_gradients_is_not_the_cause(capsys):
    models, optimizers = several(2)
    backward(models[0], optimizers, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert [m.w.item() for m in models] == [-1.0, 0.0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("x", "scale"), [(1.0, 2.0**17), (HUGE, 2.0**15)])
def test_a_block_inside_a_block_of_the_same_loss(x, scale):
    models, optimizers = several(2)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1999}})
    with amp.scale_loss(models[0](1.0), optimizers[0]) as outer:
        with amp.scale_loss(models[1](x), optimizers[1]) as inner:
            (outer + inner).backward()
        with pytest.raises(MisuseError, match="leave that block first"):
            optimizers[1].step()
    for optimizer in optimizers:
        optimizer.step()
    assert [m.w.item() for m in models] == [-1.0, -1.0 if x == 1.0 else 0.0]
    assert state()[0] == scale


def test_optimizers_with_a_parameter_in_common_are_refused():
    model = Weight()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    model, optimizers = amp.initialize(model, optimizers)
    with pytest.raises(MisuseError, match="in common"):
        backward(model, optimizers, 1.0)
    backward(model, optimizers[0], 1.0)
    assert model.w.grad.item() == 1.0


def test_what_comes_in_as_a_list_comes_out_as_a_list():
    def one():
        model = Weight()
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    (a, x), (b, y) = one(), one()
    assert amp.initialize(a, x) == (a, x)
    assert amp.initialize([a, b], [x, y]) == ([a, b], [x, y])
    assert amp.initialize(a, [x]) == (a, [x])
    assert amp.initialize([a], x) == ([a], x)
    assert amp.initialize(a) is a
    assert amp.initialize([a, b]) == [a, b]
    (a, x), (b, y) = one(), one()
    nets, optimizers = amp.initialize([a, b], [x, y], opt_level="O2")
    assert nets == [a, b]
    assert [type(o) for o in optimizers] == [MasterWeights, MasterWeights]


def test_a_second_call_with_another_level_leaves_the_first_models_casts_alone():
    first = amp.initialize(nn.Sequential(nn.Linear(2, 1)), opt_level="O1")
    seen = []
    first[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    amp.initialize(nn.Linear(2, 1), opt_level="O2")
    first(torch.ones(1, 2))
    assert seen == [torch.float16]


def test_initialized_in_two_calls_for_two_nets():
    a, b = Weight(), Weight()
    a, x = amp.initialize(a, torch.optim.SGD(a.parameters(), lr=1.0))
    b, y = amp.initialize(b, torch.optim.SGD(b.parameters(), lr=1.0))
    for model, optimizer in ((a, x), (b, y)):
        backward(model, optimizer, 1.0)
        optimizer.step()
    assert (a.w.item(), b.w.item()) == (-1.0, -1.0)
    assert state() == (2.0**16, 2)  # one scaler for both, as in apex


# Levels


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)
    )


def train(model, optimizer, step, n=8):
    torch.manual_seed(1)
    for _ in range(n):
        x, y = torch.randn(32, 6), torch.randint(3, (32,))
        optimizer.zero_grad()
        step(nn.functional.cross_entropy(model(x), y))
    return [p.detach().clone() for p in model.parameters()]


def by_amp(level, **settings):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **settings)

    def step(loss):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return train(model, optimizer, step)


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_o0_is_plain_training_to_the_bit():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(loss):
        loss.backward()
        optimizer.step()

    plain = train(model, optimizer, step)
    assert equal(by_amp("O0"), plain)
    assert equal(by_amp("O2", enabled=False), plain)


def test_o1_is_autocast_and_a_scaler_to_the_bit():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", rule="apex")

    class Cast(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", torch.float16):
                return model(x).float()

        def parameters(self, recurse=True):
            return model.parameters()

    def step(loss):
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert equal(by_amp("O1"), train(Cast(), optimizer, step))


def test_o2_is_half_model_masters_and_a_scaler_to_the_bit():
    model = net()
    exact = [p.detach().clone() for p in model.parameters()]
    model = half_model(model, keep_fp32=lambda m: isinstance(m, nn.BatchNorm1d))
    optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.refresh(exact)
    scaler = GradScaler("cpu", rule="apex")

    def step(loss):
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert equal(by_amp("O2"), train(model, optimizer, step))


def test_what_each_level_makes_of_weights_and_outputs():
    half, single = torch.float16, torch.float32
    expected = {  # linear, batch norm, layer norm, masters?
        ("O0", None): (single, single, single, False),
        ("O1", None): (single, single, single, False),
        ("O2", None): (half, single, half, True),
        ("O2", "False"): (half, half, half, True),
        ("O3", None): (half, half, half, False),
        ("O3", True): (half, single, half, False),
    }
    for (level, keep), (linear, batch, layer, masters) in expected.items():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, keep_batchnorm_fp32=keep
        )
        kinds = [model[i].weight.dtype for i in (0, 1, 3)]
        assert kinds == [linear, batch, layer], level
        assert isinstance(optimizer, MasterWeights) is masters
        assert model(torch.randn(4, 6)).dtype == single
        assert all(v.dtype != half for v in model.state_dict().values()), level


def test_overrides_of_a_level():
    model, optimizer = start(opt_level="O2", master_weights=False, loss_scale="128.0")
    assert isinstance(optimizer, torch.optim.SGD)
    assert state()[0] == 128.0
    model, optimizer = start(opt_level="O3", master_weights=True)
    assert isinstance(optimizer, MasterWeights)
    model, optimizer = start(opt_level="O2", cast_model_type=torch.bfloat16)
    assert model.w.dtype == torch.bfloat16
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", patch_torch_functions=False)
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(torch.is_autocast_enabled("cpu")))
    model(torch.ones(1, 2))
    assert seen == [False]


def test_outputs_of_the_type_that_is_asked_for():
    for level in ("O0", "O1", "O2", "O3"):
        model = amp.initialize(nn.Linear(2, 2), opt_level=level, cast_model_outputs=torch.float16)
        assert model(torch.ones(1, 2)).dtype == torch.float16


def test_o3_steps_float16_weights_even_with_a_fused_optimizer():
    model = Weight(*[1.0] * 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3")
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert model.w.tolist() == [0.5] * 64


def test_a_static_scale_is_checked_too(capsys):
    model, optimizer = start(loss_scale=128.0)
    backward(model, optimizer, HUGE)
    optimizer.step()
    assert model.w.item() == 0.0
    said = "Gradient overflow.  Skipping step, loss scaler 0 keeping loss scale 128.0\n"
    assert capsys.readouterr().out == said
    with pytest.warns(UserWarning, match="not a power of two"):
        model, optimizer = start(loss_scale=1000)
    backward(model, optimizer, 1.0)
    optimizer.step()
    assert (model.w.item(), state()[0]) == (pytest.approx(-1.0), 1000.0)
    backward(model, optimizer, HUGE)
    assert state()[0] == 1000.0


def test_bounds_that_are_no_powers_of_two_are_taken_with_a_warning():
    with pytest.warns(UserWarning, match="max_loss_scale is 1000"):
        start(max_loss_scale=1000.0)
    assert state()[0] == 1000.0


# The model


def test_a_copy_of_an_o1_model_runs_its_own_weights():
    model, _ = start(1.0)
    other = copy.deepcopy(model)
    third = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        other.w.fill_(5.0)
        third.w.fill_(7.0)
    assert (model(1.0).item(), other(1.0).item(), third(1.0).item()) == (1.0, 5.0, 7.0)


def test_a_replica_of_an_o1_model_runs_its_own_weights():
    model, _ = start(1.0)
    replica = model._replicate_for_data_parallel()  # what nn.DataParallel puts on each GPU
    replica.w = torch.tensor([5.0])
    assert (model(1.0).item(), replica(1.0).item()) == (1.0, 5.0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_inputs_of_any_float_type_wherever_they_are(level, kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, pair, more):
            return {"sum": [self.inner(pair[0] + more["x"]), pair[1]]}

    class InABatch(Net):
        def forward(self, batch):
            return super().forward((batch.x, batch.ids), {"x": batch.x})

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        ids: torch.Tensor

    x, ids = torch.ones(1, 2, dtype=kind), torch.arange(2)
    outs = [
        amp.initialize(Net(), opt_level=level)([x, ids], more={"x": x}),
        amp.initialize(InABatch(), opt_level=level)(Batch(x, ids)),
    ]
    for out, same in (made["sum"] for made in outs):
        assert out.dtype == torch.float32
        assert same is ids


def test_a_forward_around_that_of_an_o1_model_gets_what_was_given():
    model = amp.initialize(nn.Linear(2, 1), opt_level="O1", verbosity=0)
    around, given = model.forward, []

    def timed(x):
        return around(x)

    model.forward = timed
    model.register_forward_hook(lambda *told: given.append(told[1:3]), with_kwargs=True)
    x = torch.ones(1, 2)
    assert model(x).dtype is torch.float32
    model.forward = around
    model(x)
    assert [(list(args), kwargs) for args, kwargs in given] == [([x], {}), ([x], {})]


def test_a_forward_of_the_models_own_is_kept_and_autocast_ends_after_an_exception():
    model = nn.Linear(2, 2)
    plain = model.forward
    model.forward = own = lambda x, twice=False: plain(x) * (2 if twice else 1)
    for _ in range(2):
        model = amp.initialize(model, opt_level="O1")
    assert own in model.forward.args  # wrapped once
    x = torch.ones(1, 2)
    assert torch.equal(model(x, twice=True), model(x) * 2)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert not torch.is_autocast_enabled("cpu")


def test_masters_begin_as_the_weights_that_were_rounded():
    exact = 1 + 2.0**-20
    model, optimizer = start(exact, opt_level="O2")
    assert model.w.item() == 1.0
    (master,) = amp.master_params(optimizer)
    assert master.item() == exact


def test_weights_loaded_before_the_first_pass_are_trained():
    exact = 1 + 2.0**-20
    pair = nn.ModuleList([Weight(exact), Weight(exact)])
    optimizer = torch.optim.SGD(pair.parameters(), lr=1.0)
    pair, optimizer = amp.initialize(pair, optimizer, opt_level="O2")
    pair[0].load_state_dict({"w": torch.tensor([3.0])})
    backward(pair[0], optimizer, UP)
    optimizer.step()
    first, second = amp.master_params(optimizer)
    assert (first.item(), second.item()) == (3.0 - UP, exact)  # the other keeps its master
    pair[0].load_state_dict({"w": torch.tensor([5.0])})
    backward(pair[0], optimizer, UP)
    with pytest.raises(MisuseError, match="refresh"):
        optimizer.step()


def test_the_optimizer_that_was_passed_in_goes_on_working():
    model = Weight(1.0)
    given = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, given, opt_level="O2")  # apex works in place, so some take nothing back
    given.param_groups[0]["lr"] = 1.0
    given.zero_grad()
    backward(model, given, 2.0**-13)
    nn.utils.clip_grad_norm_(amp.master_params(given), 10.0)
    given.step()
    (master,) = amp.master_params(given)
    assert (model.w.item(), master.item()) == (1.0, 1 - 2.0**-13)
    saved = given.state_dict()
    assert saved["param_groups"][0]["lr"] == 1.0
    assert saved["state"][0]["master"].item() == 1 - 2.0**-13


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_group_added_after_initialize_is_trained_and_scheduled(level):
    model = nn.ModuleList([Weight(), Weight()])
    given = torch.optim.SGD(model[0].parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, given, opt_level=level)
    given.add_param_group({"params": model[1].parameters()})
    for each in model:
        backward(each, optimizer, UP)
    for group in given.param_groups:  # as a schedule that was made of it does
        group["lr"] = 0.5
    optimizer.step()
    assert [each.w.item() for each in model] == [-UP / 2, -UP / 2]


def test_other_arguments_of_an_optimizers_step_reach_it():
    class Boosted(torch.optim.SGD):
        def step(self, closure=None, *, boost):
            self.param_groups[0]["lr"] = boost
            return super().step(closure)

    model = Weight()
    model, optimizer = amp.initialize(model, Boosted(model.parameters(), lr=1.0))
    backward(model, optimizer, 1.0)
    optimizer.step(boost=3.0)
    assert model.w.item() == -3.0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_schedule_made_before_or_after_gives_no_warning(level, when):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 2.0**-i)

    model = Weight(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    decay = schedule(optimizer) if when == "before" else None
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    decay = decay or schedule(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (HUGE if level == "O1" else 8.0, UP, UP):  # the very first one is skipped
            optimizer.zero_grad()
            backward(model, optimizer, x)
            optimizer.step()
            decay.step()
    assert model.w.item() == -UP * (0.5 + 0.25)


# Casts


@pytest.fixture
def o1():
    return amp.initialize(nn.Sequential(nn.Linear(2, 2)), opt_level="O1")


def test_functions_with_a_precision_of_their_own(o1):
    single, half = torch.ones(2), torch.ones(2).half()
    dot = lambda a, b: torch.dot(a, b)
    assert amp.half_function(dot)(single, b=single).dtype == torch.float16
    assert amp.float_function(dot)(half, half).dtype == torch.float32
    assert amp.promote_function(dot)(half, single).dtype == torch.float32
    assert amp.promote_function(dot)(half, half).dtype == torch.float16
    nested = amp.half_function(lambda pair, n: (pair[0].dtype, pair[1]["x"].dtype, n))
    assert nested([single, {"x": single}], 3) == (torch.float16, torch.float16, 3)
    assert amp.half_function(lambda ids: ids.dtype)(torch.ones(1, dtype=torch.long)) == torch.long


def test_a_float_function_stays_float_inside_the_models_forward():
    @amp.float_function
    def product(a, b):
        return a @ b  # autocast would make it float16

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = nn.Linear(2, 2), []

        def forward(self, x):
            y = self.inner(x)
            self.seen += [y.dtype, (y @ y).dtype, product(y, y).dtype]
            with amp.disable_casts():
                self.seen.append((y.float() @ y.float()).dtype)
            return y

    model = amp.initialize(Net(), opt_level="O1")
    model(torch.ones(2, 2))
    assert model.seen == [torch.float16, torch.float16, torch.float32, torch.float32]


def test_registered_functions_and_what_undoes_their_casts(o1):
    single = torch.ones(2)
    mine = types.SimpleNamespace(dot=torch.dot)
    amp.register_half_function(mine, "dot")
    assert mine.dot(single, single).dtype == torch.float16
    with amp.disable_casts():
        assert mine.dot(single, single).dtype == torch.float32
        with amp.disable_casts():
            pass
        assert mine.dot(single, single).dtype == torch.float32
    amp.register_float_function(mine, "dot")  # the last one counts
    assert mine.dot(single.half(), single.half()).dtype == torch.float32
    amp.register_promote_function(mine, "dot")
    assert mine.dot(single.half(), single).dtype == torch.float32
    with pytest.raises(SettingsError, match="no function 'dat'"):
        amp.register_half_function(mine, "dat")
    amp.initialize(nn.Linear(1, 1), opt_level="O2")
    assert amp.half_function(torch.dot)(single, single).dtype == torch.float32


# State


def test_apexs_own_checkpoint_loads():
    start(num_losses=2)
    saved = {
        "loss_scaler0": {"loss_scale": 2048.0, "unskipped": 1711},
        "loss_scaler1": {"loss_scale": 16777216.0, "unskipped": 3},
    }
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    amp.load_state_dict(torch.load(file))
    assert amp.state_dict() == saved
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2048.0, 2.0**24]
    assert amp._amp_state.loss_scalers[0]._loss_scale == 2048.0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("rule", [None, "auto", "megatron"])
def test_a_resumed_run_goes_on_to_the_bit(level, rule):
    def begin():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return amp.initialize(
            model, optimizer, opt_level=level, rule=rule, num_losses=2, verbosity=0
        )

    def go(model, optimizer, steps):
        for i in steps:
            torch.manual_seed(i)
            optimizer.zero_grad()
            for loss_id in range(2):
                loss = model(torch.randn(16, 6)).square().mean() * (1e3 if i == 2 else 1.0)
                with amp.scale_loss(loss, optimizer, loss_id) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()

    model, optimizer = begin()
    go(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    go(model, optimizer, range(5, 9))
    expected = [p.detach().clone() for p in model.parameters()], amp.state_dict()

    model, optimizer = begin()
    for thing, its in zip((model, optimizer, amp), saved):
        thing.load_state_dict(its)
    go(model, optimizer, range(5, 9))
    assert equal(expected[0], model.parameters())
    assert amp.state_dict() == expected[1]
    two = {"loss_scale", "unskipped"}
    assert {*amp.state_dict()["loss_scaler1"]} == (two if rule is None else two | {"gradlift"})


def test_a_checkpoint_of_o2_loads_into_o1():
    model, optimizer = start(1.0, opt_level="O2")
    backward(model, optimizer, UP)
    optimizer.step()
    saved = model.state_dict(), optimizer.state_dict()
    model, optimizer = start(0.0, opt_level="O1")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert model.w.item() == 1 - UP


def test_a_state_of_another_number_of_losses_loads_as_far_as_it_goes():
    start(num_losses=2)
    with pytest.warns(UserWarning, match="1 loss scalers"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})
    assert (state(0), state(1)) == ((2.0, 1), (2.0**16, 0))
    start()
    three = {f"loss_scaler{i}": {"loss_scale": 2.0 ** (i + 3), "unskipped": i} for i in range(3)}
    with pytest.warns(UserWarning, match="the first 1 are loaded"):
        amp.load_state_dict(three)
    assert state() == (8.0, 0)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"scaler": {}}, "unexpected keys"),
        ({"loss_scaler0": {"loss_scale": 2.0}}, "unskipped"),
        ({"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 0}}, "scale"),
        ({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}, "scale"),
        ({"loss_scaler0": {"loss_scale": 3.0, "unskipped": 0}}, "power of two"),
        ({"loss_scaler0": {"loss_scale": 2.0, "unskipped": -1}}, "clean"),
        ({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0, "gradlift": 1}}, "history"),
        ([1], "a dict"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(bad, match):
    start()
    with pytest.raises(StateError, match=match):
        amp.load_state_dict(bad)
    assert state() == (2.0**16, 0)


# Disabled, misused


def test_disabled_is_transparent():
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = model(3.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    assert [p.grad.item() for p in amp.master_params(optimizer)] == [3.0]
    optimizer.step()
    assert model.w.item() == -3.0
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})
    assert "step" not in vars(optimizer)
    assert amp._amp_state.loss_scalers == []


def test_misuse_is_named():
    model, optimizer = start()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(MisuseError, match="did not go through"):
        backward(model, other, 1.0)
    for loss_id in (1, -1):
        with pytest.raises(MisuseError, match=f"loss_id is {loss_id}, expected 0 to 0"):
            backward(model, optimizer, 1.0, loss_id=loss_id)
    with pytest.raises(MisuseError, match="after the block"):  # noqa: SIM117
        with amp.scale_loss(model(1.0), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
    with pytest.raises(MisuseError, match="no closure"):
        optimizer.step(lambda: 0)
    with pytest.raises(MisuseError, match="entered twice"):  # noqa: SIM117
        with amp.scale_loss(model(1.0), optimizer):
            with amp.scale_loss(model(1.0), [optimizer]):
                pass
    with pytest.raises(MisuseError, match="floating-point"):  # noqa: SIM117
        with amp.scale_loss(torch.tensor(1), optimizer):
            pass
    optimizer.zero_grad()
    backward(model, optimizer, 1.0)  # and all goes on
    optimizer.step(None)
    optimizer.step(closure=None)
    assert model.w.item() == -2.0
    with pytest.raises(MisuseError, match="float16 already"):
        amp.initialize(nn.Linear(1, 1).half(), opt_level="O2")
    with pytest.raises(MisuseError, match="wrap it after"):
        amp.initialize(nn.DataParallel(nn.Linear(1, 1)))
    decay = torch.optim.lr_scheduler.ConstantLR(other)
    for optimizers in (decay, [decay]):
        with pytest.raises(MisuseError, match="wants optimizers, this is ConstantLR"):
            amp.initialize(Weight(), optimizers)
    with pytest.raises(MisuseError, match="wants models, this is SGD"):
        amp.initialize(other, Weight())
    for settings, match in {
        "opt_level is 'O4'": {"opt_level": "O4"},
        "belongs to 'O1'": {"opt_level": "O2", "patch_torch_functions": True},
        "keep_batchnorm_fp32 is True": {"opt_level": "O1", "keep_batchnorm_fp32": True},
        "master_weights is 'yes'": {"opt_level": "O2", "master_weights": "yes"},
        "loss_scale is 'big'": {"loss_scale": "big"},
        "pass one of them": {"rule": "auto", "loss_scale": 2.0},
    }.items():
        with pytest.raises(GradliftError, match=settings):
            start(**match)


def test_before_initialize_everything_says_so(monkeypatch):
    monkeypatch.setattr(amp._amp_state, "initialized", False)
    w = nn.Parameter(torch.zeros(1))
    with pytest.raises(MisuseError, match="not initialized"):  # noqa: SIM117
        with amp.scale_loss(w.sum(), torch.optim.SGD([w])):
            pass
    with pytest.raises(MisuseError, match="not initialized"):
        amp.state_dict()


# Beyond apex


def test_another_rule_and_a_journal(tmp_path, capsys):
    with Journal(tmp_path / "run.jsonl") as journal:
        model, optimizer = start(journal=journal, num_losses=2)
        for x in (1.0, HUGE, 1.0):
            optimizer.zero_grad()
            backward(model, optimizer, x, loss_id=1)
            optimizer.step()
    run = read_journal(tmp_path / "run.jsonl")
    assert [(s.key, s.scale, s.verdict) for s in run.steps] == [
        ("loss 1", 2.0**16, Verdict.APPLY),
        ("loss 1", 2.0**16, Verdict.SKIP),
        ("loss 1", 2.0**15, Verdict.APPLY),
    ]
    assert (run.steps[1].cause, run.steps[1].culprits) == (Cause.OVERFLOW, ("w",))
    model, optimizer = start(rule="auto")
    backward(model, optimizer, 2.0**-20)
    assert state()[0] > 2.0**30


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_scaling_at_all(level):
    model, optimizer = start(opt_level=level, rule="off")
    for x in (1.0, 2.0):
        backward(model, optimizer, x)
    assert model.w.grad.item() == 3.0
    with pytest.raises(ValueError, match="mine"):  # noqa: SIM117
        with amp.scale_loss(model(1.0), optimizer):
            raise ValueError("mine")
    optimizer.step()
    assert model.w.item() == -3.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_path_of_an_accelerator_does_the_same(level, capsys):
    model, optimizer = start(opt_level=level)
    amp._amp_state.scaler._force_device_path = True
    for xs in ((UP, UP), (8.0 if level == "O2" else HUGE, UP), (UP, 2.0**-18)):
        optimizer.zero_grad()
        for x in xs:
            backward(model, optimizer, x)
        optimizer.step()
    (weight,) = amp.master_params(optimizer)
    assert weight.item() == -(3 * UP + 2.0**-18)
    assert state() == (2.0**15, 3)
    assert capsys.readouterr().out == LINE.format(0, 32768.0)


def test_the_guard_leaves_nothing_open():
    model, optimizer = start()
    backward(model, optimizer, 1.0, delay_unscale=True)
    optimizer.step()
    guard = guard_of(optimizer)
    assert (guard.aside, guard.passes, guard.overflows) == ([], [], [])


# What stands in for the rest of apex


def test_stand_ins_are_torchs_own_and_refuse_what_torch_does_not_do():
    params = [nn.Parameter(torch.ones(2))]
    adam = FusedAdam(params, 1e-2, betas=(0.8, 0.9), adam_w_mode=False, weight_decay=0.1)
    assert type(adam) is torch.optim.Adam
    assert adam.defaults["betas"] == (0.8, 0.9)
    assert type(FusedSGD(params, 0.1, momentum=0.9)) is torch.optim.SGD
    with pytest.raises(SettingsError, match="bias_correction"):
        FusedAdam(params, bias_correction=False)
    with pytest.raises(SettingsError, match="wd_after_momentum"):
        FusedSGD(params, 0.1, wd_after_momentum=True)
    with pytest.raises(SettingsError, match="averages"):
        DistributedDataParallel(nn.Linear(1, 1), gradient_average=False)
    with pytest.raises(SettingsError, match="no argument sped"):
        DistributedDataParallel(nn.Linear(1, 1), sped=2.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_apexs_fused_adam_saved_loads(level):
    def begin():
        model = Weight(1.0)
        return amp.initialize(model, FusedAdam(model.parameters(), lr=0.5), opt_level=level)

    def go(model, optimizer, x):
        optimizer.zero_grad()
        backward(model, optimizer, x)
        optimizer.step()

    model, optimizer = begin()
    go(model, optimizer, UP)
    weights, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"][0]))
    moments = {name: saved[name] for name in ("exp_avg", "exp_avg_sq")}
    group = {"params": [0], "lr": 0.5, "bias_correction": True, "betas": (0.9, 0.999), "step": 1}
    theirs = {"state": {0: moments}, "param_groups": [{**group, "eps": 1e-8, "weight_decay": 0.0}]}
    go(model, optimizer, UP / 2)
    again, resumed = begin()
    again.load_state_dict(weights)
    resumed.load_state_dict(theirs)
    go(again, resumed, UP / 2)
    assert again.w.item() == model.w.item()
    assert "step" not in resumed.param_groups[0]  # so that it does not count when saved again


def test_a_module_whose_constructor_failed_does_not_disturb_the_search_for_names():
    broken = nn.Module.__new__(nn.Linear)
    model, optimizer = start()
    backward(model, optimizer, HUGE)
    assert amp._amp_state.scaler.result.culprits == ("w",)
    del broken


def test_the_rule_is_apexs():
    start()
    assert amp._amp_state.scaler.rule == Backoff(min_scale=2.0**-126, max_scale=2.0**24)
