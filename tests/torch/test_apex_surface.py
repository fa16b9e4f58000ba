"""What scripts import from apex beside `amp`: norms, optimizers, helpers; the scale set by hand."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradlift.apex import amp, optimizers, parallel
from gradlift.apex.fp16_utils import (
    DynamicLossScaler,
    LossScaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from gradlift.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from gradlift.apex.normalization import fused_layer_norm as functions
from gradlift.errors import MisuseError, SettingsError

HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
scalers = amp._amp_state


# The scale, read and set by hand


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.w * x).sum()


def start(**settings):
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, verbosity=0, **settings)


def backward(model, optimizer, x, **how):
    with amp.scale_loss(model(x), optimizer, **how) as scaled_loss:
        scaled_loss.backward()
    return scaled_loss.item()


def test_a_scale_set_by_hand_is_used_and_moves_on_from_there():
    model, optimizer = start(num_losses=2)
    scalers.loss_scalers[1]._loss_scale = 2**20
    scalers.loss_scalers[1]._unskipped = 1999
    model.w.data.fill_(1.0)
    assert backward(model, optimizer, 1.0, loss_id=1) == 2.0**20
    assert [s._loss_scale for s in scalers.loss_scalers] == [2.0**16, 2.0**21]
    assert [s._unskipped for s in scalers.loss_scalers] == [0, 0]
    assert not scalers.loss_scalers[1]._has_overflow
    backward(model, optimizer, 1e37, loss_id=1)
    assert [s._has_overflow for s in scalers.loss_scalers] == [False, True]
    assert scalers.loss_scalers[1].loss_scale() == 2.0**20
    optimizer.zero_grad()
    backward(model, optimizer, 3.0, loss_id=1)
    optimizer.step()
    assert model.w.item() == -2.0


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_constant_scale_can_be_set_for_each_loss(level):
    model, optimizer = start(num_losses=2, opt_level=level)
    for scaler, scale in zip(scalers.loss_scalers, (4.0, 16.0)):
        assert not scaler.dynamic
        scaler._loss_scale = scale
    model.w.data.fill_(1.0)
    assert [backward(model, optimizer, 1.0, loss_id=i) for i in range(2)] == [4.0, 16.0]
    optimizer.step()
    assert model.w.item() == -1.0
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [4.0, 16.0]


def test_a_delayed_pass_keeps_the_scale_that_it_had():
    model, optimizer = start()
    backward(model, optimizer, 3.0, delay_unscale=True)
    scalers.loss_scalers[0]._loss_scale = 4.0
    optimizer.step()
    assert model.w.item() == -3.0


def test_a_delayed_pass_is_settled_before_init_begins_anew():
    model, optimizer = start()
    scalers.loss_scalers[0]._loss_scale = 4.0
    backward(model, optimizer, 3.0, delay_unscale=True)
    amp.init()._deactivate()
    optimizer.step()
    assert model.w.item() == -3.0


def test_what_the_scale_cannot_be_is_refused():
    model, optimizer = start()
    for bad in (0.0, float("nan"), 2.0**25):
        with pytest.raises(SettingsError, match="expected a number in"):
            scalers.loss_scalers[0]._loss_scale = bad
    with pytest.raises(MisuseError, match="leave that block first"):  # noqa: SIM117
        with amp.scale_loss(model(1.0), optimizer):
            scalers.loss_scalers[0]._loss_scale = 4.0
    assert scalers.loss_scalers[0].loss_scale() == 2.0**16
    scalers.loss_scalers[0]._loss_scale = 5  # scripts do
    model.w.data.fill_(1.0)
    assert backward(model, optimizer, 1.0) == 5.0


def test_a_state_with_a_scale_set_by_hand_is_apexs_and_loads():
    start()
    scalers.loss_scalers[0]._loss_scale = 2**20
    saved = amp.state_dict()
    assert saved == {"loss_scaler0": {"loss_scale": 2.0**20, "unskipped": 0}}
    start()
    amp.load_state_dict(saved)
    assert scalers.loss_scalers[0].loss_scale() == 2.0**20


def test_deactivate_ends_the_casts_of_models_too():
    seen = []
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    net = amp.initialize(net, opt_level="O1")
    single = amp.half_function(lambda x: x.dtype)
    net(torch.ones(1, 2))
    assert single(torch.ones(1)) is HALF
    scalers.handle._deactivate()
    net(torch.ones(1, 2))
    assert single(torch.ones(1)) is SINGLE
    assert seen == [HALF, SINGLE]


def test_incoming_half_models_are_refused_unless_allowed(monkeypatch):
    net = nn.Linear(2, 1).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with pytest.raises(MisuseError, match="float16 already"):
        amp.initialize(net, optimizer, opt_level="O2")
    monkeypatch.setattr(scalers, "allow_incoming_model_not_fp32", True)
    amp.initialize(net, optimizer, opt_level="O2", cast_model_type=False)
    assert {p.dtype for p in amp.master_params(optimizer)} == {SINGLE}


# Norms


@pytest.mark.parametrize("shape", [4, (3, 4)])
def test_norms_are_torchs_to_the_bit(shape):
    x = torch.randn(2, 3, 4)
    assert torch.equal(FusedLayerNorm(shape)(x), nn.LayerNorm(shape)(x))
    assert torch.equal(MixedFusedLayerNorm(shape)(x), nn.LayerNorm(shape)(x))
    assert torch.equal(FusedRMSNorm(shape)(x), nn.RMSNorm(shape, eps=1e-5)(x))
    assert torch.equal(MixedFusedRMSNorm(shape)(x), nn.RMSNorm(shape, eps=1e-5)(x))
    for kind in (FusedLayerNorm, FusedRMSNorm):
        bare = kind(shape, elementwise_affine=False, memory_efficient=True)
        assert [*bare.parameters()] == []
        assert bare(x).shape == x.shape
    for kind in (MixedFusedLayerNorm, MixedFusedRMSNorm):
        with pytest.raises(SettingsError, match="of its weights' type"):
            kind(shape, elementwise_affine=False)


@pytest.mark.parametrize("given", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("held", [HALF, BRAIN, SINGLE])
def test_a_norms_result_is_of_its_inputs_type_a_mixed_norms_of_its_weights(given, held):
    x = torch.randn(2, 8)
    for kind, mixed in (
        (FusedLayerNorm, MixedFusedLayerNorm),
        (FusedRMSNorm, MixedFusedRMSNorm),
    ):
        exact = kind(8)(x)
        for each, dtype in ((kind, given), (mixed, held)):
            y = x.to(given).requires_grad_()
            norm = each(8).to(held)
            out = norm(y)
            assert out.dtype is dtype
            torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0.05)
            out.float().square().sum().backward()
            assert (y.grad.dtype, norm.weight.grad.dtype) == (given, held)


def test_functions_of_norms():
    x, w, b = torch.randn(2, 8), torch.randn(8), torch.randn(8)
    layer = functional.layer_norm(x, [8], w, b, 1e-6)
    rms = functional.rms_norm(x, [8], w, 1e-6)
    for name, args, expected in (
        ("fused_layer_norm_affine", (x, w, b, 8), layer),
        ("mixed_dtype_fused_layer_norm_affine", (x, w, b, (8,)), layer),
        ("fused_layer_norm", (x, 8), functional.layer_norm(x, [8], eps=1e-6)),
        ("fused_rms_norm_affine", (x, w, (8,)), rms),
        ("mixed_dtype_fused_rms_norm_affine", (x, w, 8), rms),
        ("fused_rms_norm", (x, 8), functional.rms_norm(x, [8], eps=1e-6)),
        ("manual_rms_norm", (x, (8,), w, 1e-6), rms),
    ):
        assert torch.equal(getattr(functions, name)(*args), expected), name
    applied = functions.FusedLayerNormAffineFunction.apply(x, w, b, (8,), 1e-6)
    assert torch.equal(applied, layer)
    assert torch.equal(functions.FusedRMSNormAffineFunction.apply(x, w, (8,), 1e-6), rms)


# Optimizers, and what is refused


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"])
def test_optimizers_that_torch_lacks_say_what_to_use_when_they_are_made(name):
    kind = getattr(optimizers, name)
    with pytest.raises(
        SettingsError, match=rf"apex's {name} is not here.*timm\.optim\..*FusedAdam"
    ):
        kind([nn.Parameter(torch.ones(1))], lr=0.1, betas=(0.9, 0.98))


def test_the_rest_of_what_is_refused_when_it_is_made_or_imported():
    with pytest.raises(SettingsError, match=r"timm\.optim\.Lars"):
        parallel.LARC(None, trust_coefficient=0.1)
    with pytest.raises(SettingsError, match=r"all_reduce"):
        parallel.Reducer(nn.Linear(1, 1))
    with pytest.raises(SettingsError, match="adagrad_w_mode"):
        optimizers.FusedAdagrad([nn.Parameter(torch.ones(1))], adagrad_w_mode=True)
    with pytest.raises(ImportError, match=r"apex\.transformer is not here.*megatron\.core"):
        importlib.import_module("gradlift.apex.transformer")


def test_apexs_distributed_wrapper_takes_a_predivide_factor(tmp_path):
    """Gradients are divided by it before they are added, and multiplied after: it changes none."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Weight()
        wrapped = parallel.DistributedDataParallel(
            model, message_size=250_000_000, gradient_predivide_factor=8.0
        )
        wrapped(3.0).backward()
        assert model.w.grad.item() == 3.0
        group = parallel.create_syncbn_process_group(1)
        assert torch.distributed.get_world_size(group) == 1
        norm = parallel.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)), group)[0]
        assert norm.process_group is group
    finally:
        torch.distributed.destroy_process_group()


# Helpers of fp16_utils


@pytest.mark.parametrize("flat", [False, True])
def test_a_loop_over_masters_of_ones_own(flat):
    model = nn.Linear(3, 2).half()
    exact = [p.detach().clone().float() for p in model.parameters()]
    params, masters = prep_param_lists(model, flat_master=flat)
    optimizer = torch.optim.SGD(masters, lr=1.0)
    small = 2.0**-13  # less than half a unit of float16 near 1: only masters add it up
    for _ in range(8):
        for p in params:
            p.grad = torch.full_like(p, small * 2**10)
        model_grads_to_master_grads(params, masters, flat_master=flat)
        for p in masters:
            p.grad /= 2**10
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
    for p, before in zip(params, exact):
        assert torch.equal(p, (before - 8 * small).half())


def test_flat_masters_want_one_type_and_every_gradient():
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 1))
    with pytest.raises(MisuseError, match=r"\['torch.float16', 'torch.float32'\]"):
        prep_param_lists(model, flat_master=True)
    params, masters = prep_param_lists(nn.Linear(2, 1).half(), flat_master=True)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(MisuseError, match="1 have none"):
        model_grads_to_master_grads(params, masters, flat_master=True)
    params, masters = prep_param_lists(nn.Linear(2, 1).half())
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None


def test_the_scalers_of_fp16_utils_move_as_apexs():
    scaler = DynamicLossScaler(init_scale=2**4, scale_factor=4.0, scale_window=2)
    scales = []
    for overflow in (False, False, True, True, True, False, False):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [16.0, 64.0, 16.0, 4.0, 1.0, 1.0, 4.0]
    fixed = LossScaler(128.0)
    fixed.update_scale(True)
    assert fixed.loss_scale == 128.0
    fixed.cur_scale = 64.0
    w = nn.Parameter(torch.ones(1).half())
    fixed.backward((w * 4096.0).sum())
    assert fixed.has_overflow([w])  # apex's never says so
    assert fixed.scale_gradient(None, (torch.ones(1), None), None)[0].item() == 64.0
