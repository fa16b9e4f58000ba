"""Lightning Fabric with gradlift's plugin, and what Fabric's own one does with the same."""

import logging

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as Own
from story import (
    BATCHES,
    CLEAN,
    LRS,
    RULE,
    SCALE,
    SKIPPED,
    assert_same,
    loss_of,
    make_net,
    make_optimizer,
    make_schedule,
    plain,
    true_gradients,
)

from gradlift.errors import SettingsError
from gradlift.integrations.fabric import MixedPrecision

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
GROWING = "dynamic:init_scale=2^10,growth_interval=3"
LIMIT = 0.25


def ours(rule=RULE, **settings):
    return MixedPrecision("16-mixed", "cpu", rule=rule, **settings)


def own():
    return Own("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))


def made(plugin):
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin])


def clip(fabric, net, optimizer, by):
    if by == "norm":
        fabric.clip_gradients(net, optimizer, max_norm=LIMIT, error_if_nonfinite=False)
    elif by == "value":
        fabric.clip_gradients(net, optimizer, clip_val=LIMIT)


def train(fabric, net, optimizer, schedule, batches=BATCHES, by=None):
    """A loop as in Fabric's documents, with the one line that moves the schedule."""
    scaler, lrs = fabric.strategy.precision.scaler, []
    for x, factor in batches:
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        fabric.backward(loss_of(net(x), factor))
        clip(fabric, net, optimizer, by)
        optimizer.step()
        if scaler.result.stepped:
            schedule.step()
    return lrs


@pytest.mark.parametrize("by", [None, "norm", "value"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflowed_leaves_the_weights(fused, by):
    plugin = ours()
    fabric = made(plugin)
    net = make_net()
    optimizer = make_optimizer(net, fused)
    schedule = make_schedule(optimizer)
    net, optimizer = fabric.setup(net, optimizer)
    assert train(fabric, net, optimizer, schedule, by=by) == LRS
    assert_same(net, plain(CLEAN, fused, by))
    assert plugin.scaler.skipped_steps == sum(SKIPPED)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_fabrics_own_scaler_refuses_to_clip_a_fused_optimizer(by):
    fabric = made(own())
    net, optimizer = fabric.setup(net := make_net(), make_optimizer(net, fused=True))
    fabric.backward(loss_of(net(BATCHES[0][0]), 1.0))
    with pytest.raises(NotImplementedError, match="Gradient clipping is not implemented"):
        clip(fabric, net, optimizer, by)


def test_accumulation():
    fabric = made(ours())
    net, optimizer = fabric.setup(net := make_net(), make_optimizer(net, fused=True))
    for i, (x, factor) in enumerate(BATCHES):
        fabric.backward(loss_of(net(x), factor) / 2)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    expected = make_net()
    stepping = make_optimizer(expected, fused=True)
    true_gradients(expected, BATCHES[:2])  # the other two windows have an overflow in them
    stepping.step()
    assert_same(net, expected)


def check_two(plugin, in_turn):
    """Two nets, the first of which overflows in the very first window, and then again."""
    fabric = made(plugin)
    nets, optimizers = [], []
    for seed in (1, 2):
        net = make_net(seed)
        net, optimizer = fabric.setup(net, make_optimizer(net))
        nets.append(net)
        optimizers.append(optimizer)
    batches = [BATCHES[i] for i in (2, 0, 4, 1)]
    for x, factor in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for net, optimizer, loud in zip(nets, optimizers, (factor, 1.0)):
            fabric.backward(loss_of(net(x), loud))
            if in_turn:
                optimizer.step()
        for optimizer in optimizers if not in_turn else []:
            optimizer.step()
    for net, seed, seen in zip(nets, (1, 2), ((1, 3), range(4))):
        expected = make_net(seed)
        optimizer = make_optimizer(expected)
        for i in seen:
            true_gradients(expected, [(batches[i][0], 1.0)])
            optimizer.step()
        assert_same(net, expected)
    assert plugin.state_dict()["scale"] == SCALE / 4


@pytest.mark.parametrize("in_turn", [False, True])
def test_two_optimizers(in_turn):
    check_two(ours("dynamic:init_scale=2^10"), in_turn)


def test_with_fabrics_own_scaler_the_second_is_unscaled_by_a_scale_it_never_had():
    check_two(own(), in_turn=True)
    with pytest.raises(AssertionError):
        check_two(own(), in_turn=False)


@pytest.mark.parametrize("rule", [GROWING, "auto"])
def test_a_run_that_was_saved_goes_on(rule, tmp_path):
    def begin():
        plugin = ours(rule)
        fabric, net = made(plugin), make_net()
        optimizer = make_optimizer(net, fused=True)
        schedule = make_schedule(optimizer)
        net, optimizer = fabric.setup(net, optimizer)
        state = {"net": net, "optimizer": optimizer, "schedule": schedule, "precision": plugin}
        return fabric, state, plugin

    fabric, whole, undisturbed = begin()
    parts = whole["net"], whole["optimizer"], whole["schedule"]
    train(fabric, *parts)
    fabric.save(tmp_path / "half.ckpt", whole)
    lrs = train(fabric, *parts)
    fabric, resumed, plugin = begin()
    fabric.load(tmp_path / "half.ckpt", resumed)
    parts = resumed["net"], resumed["optimizer"], resumed["schedule"]
    assert train(fabric, *parts) == lrs
    assert_same(resumed["net"], whole["net"])
    assert plugin.state_dict() == undisturbed.state_dict()


def test_what_is_saved_knows_of_the_last_step(tmp_path):
    """Even of the first one, whose update waits for the next loss."""
    plugin = ours("dynamic:init_scale=2^10")
    fabric = made(plugin)
    net, optimizer = fabric.setup(net := make_net(), make_optimizer(net))
    fabric.backward(loss_of(net(BATCHES[2][0]), BATCHES[2][1]))
    optimizer.step()
    fabric.save(tmp_path / "first.ckpt", {"precision": plugin})
    again = ours("dynamic:init_scale=2^10")
    fabric.load(tmp_path / "first.ckpt", {"precision": again})
    assert (again.scaler.get_scale(), again.scaler.skipped_steps) == (SCALE / 2, 1)


def test_lbfgs_is_put_back_after_an_overflow():
    plugin = ours()
    fabric, net = made(plugin), make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    net, optimizer = fabric.setup(net, optimizer)
    before = [p.clone() for p in net.parameters()]
    moved = []
    for x, factor in (BATCHES[2], BATCHES[0]):

        def closure(x=x, factor=factor):
            optimizer.zero_grad()
            loss = loss_of(net(x), factor)
            fabric.backward(loss)
            return loss

        optimizer.step(closure)
        moved.append(not all(map(torch.equal, net.parameters(), before)))
    assert moved == [False, True]
    fabric = made(own())
    net, optimizer = fabric.setup(net := make_net(), torch.optim.LBFGS(net.parameters()))
    with pytest.raises(TypeError, match="LBFGS"):
        optimizer.step(lambda: None)


def test_bfloat16_has_no_scaler():
    fabric = made(MixedPrecision("bf16-mixed", "cpu"))
    net, optimizer = fabric.setup(net := make_net(), make_optimizer(net, fused=True))
    fabric.backward(loss_of(net(BATCHES[0][0]), 1.0))
    clip(fabric, net, optimizer, "norm")
    optimizer.step()
    assert not torch.equal(next(net.parameters()), next(make_net().parameters()))
    with pytest.raises(SettingsError, match="has no scaler, so that rule"):
        MixedPrecision("bf16-mixed", "cpu", rule="auto")
