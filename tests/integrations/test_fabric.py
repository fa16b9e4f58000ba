"""Lightning Fabric with gradlift's plugin, and what Fabric's own one does with the same."""

import logging
import pickle

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as Own
from story import (
    BATCHES,
    CLEAN,
    DYNAMIC,
    GROWING,
    LIMIT,
    LRS,
    RULE,
    SCALE,
    SKIPPED,
    assert_apart,
    assert_same,
    loss_of,
    make_net,
    make_optimizer,
    parts,
    plain,
    torch_scaler,
    true_gradients,
)

from gradlift.errors import SettingsError
from gradlift.integrations.fabric import MixedPrecision

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def ours(rule=RULE, **settings):
    return MixedPrecision("16-mixed", "cpu", rule=rule, **settings)


def own():
    return Own("16-mixed", "cpu", torch_scaler())


def made(plugin):
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin])


def set_up(fabric, fused=False, seed=1):
    net = make_net(seed)
    return fabric.setup(net, make_optimizer(net, fused))


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
    net, optimizer, schedule = parts(fused)
    net, optimizer = fabric.setup(net, optimizer)
    assert train(fabric, net, optimizer, schedule, by=by) == LRS
    assert_same(net, plain(CLEAN, fused, by))
    assert plugin.scaler.skipped_steps == sum(SKIPPED)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_fabrics_own_scaler_refuses_to_clip_a_fused_optimizer(by):
    fabric = made(own())
    net, optimizer = set_up(fabric, fused=True)
    fabric.backward(loss_of(net(BATCHES[0][0]), 1.0))
    with pytest.raises(NotImplementedError, match="Gradient clipping is not implemented"):
        clip(fabric, net, optimizer, by)


def test_accumulation():
    fabric = made(ours())
    net, optimizer = set_up(fabric, fused=True)
    for i, (x, factor) in enumerate(BATCHES):
        fabric.backward(loss_of(net(x), factor) / 2)
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(net, plain([BATCHES[:2]], True))  # the others have an overflow in them


def check_two(plugin, in_turn):
    fabric = made(plugin)
    nets, optimizers = zip(*(set_up(fabric, seed=seed) for seed in (1, 2)))
    for x, factor in BATCHES:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for net, optimizer, loud in zip(nets, optimizers, (factor, 1.0)):
            fabric.backward(loss_of(net(x), loud))
            if in_turn:
                optimizer.step()
        for optimizer in optimizers if not in_turn else []:
            optimizer.step()
    assert_apart(nets)
    assert plugin.state_dict()["scale"] == SCALE / 4


@pytest.mark.parametrize("in_turn", [False, True])
def test_two_optimizers(in_turn):
    check_two(ours(DYNAMIC), in_turn)


def test_an_optimizer_that_begins_later_counts_from_its_first_gradient():
    """As a discriminator does: its first loss falls together with an overflow of the other net."""
    plugin = ours(DYNAMIC)
    fabric = made(plugin)
    (first, stepping), (second, later) = (set_up(fabric, seed=seed) for seed in (1, 2))
    for i in (0, 2):
        x, factor = BATCHES[i]
        stepping.zero_grad()
        fabric.backward(loss_of(first(x), factor))
        if i:
            fabric.backward(loss_of(second(x), 1.0))
        stepping.step()
    later.step()
    expected = make_net(2)
    true_gradients(expected, [(x, 1.0)])
    make_optimizer(expected).step()
    assert_same(second, expected)
    assert (plugin.scaler.get_scale(), plugin.scaler.skipped_steps) == (SCALE / 2, 1)


def test_with_fabrics_own_scaler_the_second_is_unscaled_by_a_scale_it_never_had():
    check_two(own(), in_turn=True)
    with pytest.raises(AssertionError):
        check_two(own(), in_turn=False)


@pytest.mark.parametrize("rule", [GROWING, "auto"])
def test_a_run_that_was_saved_goes_on(rule, tmp_path):
    def begin():
        plugin = ours(rule)
        fabric = made(plugin)
        net, optimizer, schedule = parts(fused=True)
        net, optimizer = fabric.setup(net, optimizer)
        state = {"net": net, "optimizer": optimizer, "schedule": schedule, "precision": plugin}
        return fabric, state, plugin

    def go_on(fabric, state):
        return train(fabric, state["net"], state["optimizer"], state["schedule"])

    fabric, whole, undisturbed = begin()
    go_on(fabric, whole)
    fabric.save(tmp_path / "half.ckpt", whole)
    lrs = go_on(fabric, whole)
    fabric, resumed, plugin = begin()
    fabric.load(tmp_path / "half.ckpt", resumed)
    assert go_on(fabric, resumed) == lrs
    assert_same(resumed["net"], whole["net"])
    assert plugin.state_dict() == undisturbed.state_dict()


def test_checkpoints_go_from_one_scaler_to_the_other(tmp_path):
    for plugin, reader in ((own(), ours("dynamic")), (ours("dynamic"), own())):
        scale = plugin.scaler.get_scale()
        assert reader.scaler.get_scale() != scale
        made(plugin).save(tmp_path / "run.ckpt", {"precision": plugin})
        made(reader).load(tmp_path / "run.ckpt", {"precision": reader})
        assert reader.scaler.get_scale() == scale


def test_the_very_first_step_counts_at_once():
    plugin = ours(DYNAMIC)
    fabric = made(plugin)
    net, optimizer = set_up(fabric)
    fabric.backward(loss_of(net(BATCHES[2][0]), BATCHES[2][1]))
    optimizer.step()
    assert (plugin.scaler.get_scale(), plugin.scaler.skipped_steps) == (SCALE / 2, 1)


def test_a_plugin_can_be_sent_to_another_process():
    plugin = ours(DYNAMIC)
    set_up(made(plugin))
    other = pickle.loads(pickle.dumps(plugin))
    fabric = made(other)
    net, optimizer, schedule = parts()
    net, optimizer = fabric.setup(net, optimizer)
    assert train(fabric, net, optimizer, schedule) == LRS


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
    net, optimizer = set_up(fabric, fused=True)
    fabric.backward(loss_of(net(BATCHES[0][0]), 1.0))
    clip(fabric, net, optimizer, "norm")
    optimizer.step()
    assert not torch.equal(next(net.parameters()), next(make_net().parameters()))
    with pytest.raises(SettingsError, match="has no scaler, so that rule"):
        MixedPrecision("bf16-mixed", "cpu", rule="auto")
