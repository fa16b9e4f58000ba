"""Accelerate with gradlift's scaler, and with the one it makes itself on a GPU."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import GradScalerKwargs
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
)

from gradlift import Cause, Journal, read_journal
from gradlift.errors import MisuseError, SettingsError
from gradlift.integrations.accelerate import install


def begun(**settings):
    return Accelerator(**{"mixed_precision": "fp16", "cpu": True, **settings})


def ours(accelerator, rule=RULE, **settings):
    return install(accelerator, rule, **settings)


def own(accelerator):
    """What Accelerate does by itself where there is a GPU."""
    accelerator.scaler = torch_scaler()
    accelerator.native_amp = True


def clip(accelerator, net, by):
    if by == "norm":
        accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    elif by == "value":
        accelerator.clip_grad_value_(net.parameters(), LIMIT)


def train(accelerator, net, optimizer, schedule, by=None, batches=BATCHES):
    """A loop as in Accelerate's documents; what it says of each batch."""
    lrs, skipped = [], []
    for x, factor in batches:
        with accelerator.accumulate(net):
            lrs.append(optimizer.param_groups[0]["lr"])
            accelerator.backward(loss_of(net(x), factor))
            if accelerator.sync_gradients:
                clip(accelerator, net, by)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    return lrs, skipped


# The story


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("by", [None, "norm", "value"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflowed_leaves_weights_and_schedule(fused, by, when):
    accelerator = begun()
    if when == "before":
        scaler = ours(accelerator)
    net, optimizer, schedule = accelerator.prepare(*parts(fused))
    if when == "after":
        scaler = ours(accelerator)
    assert train(accelerator, net, optimizer, schedule, by) == (LRS, SKIPPED)
    assert_same(net, plain(CLEAN, fused, by))
    assert scaler.skipped_steps == sum(SKIPPED)


@pytest.mark.parametrize("by", [None, "norm", "value"])
def test_accelerates_own_scaler_reports_no_skip_if_the_optimizer_is_fused(by):
    for fused in (False, True):
        accelerator = begun()
        own(accelerator)
        told = train(accelerator, *accelerator.prepare(*parts(fused)), by)
        assert (told == (LRS, SKIPPED)) is not fused
    assert told == ([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625], [False] * 6)


def test_on_a_cpu_accelerate_alone_computes_in_float32_and_scales_nothing():
    accelerator = begun()
    assert (accelerator.scaler, accelerator.native_amp) == (None, False)
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    ours(accelerator)
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


def test_on_an_accelerators_path_too():
    """There a fused optimizer is called in any case, and finds out by itself."""
    accelerator = begun()
    scaler = ours(accelerator)
    scaler._force_device_path = True
    net, optimizer, schedule = accelerator.prepare(*parts(fused=True))
    assert train(accelerator, net, optimizer, schedule, "norm") == (LRS, SKIPPED)
    assert_same(net, plain(CLEAN, True, "norm"), exact=False)


def test_accumulation():
    accelerator = begun(gradient_accumulation_steps=2)
    ours(accelerator)
    net, optimizer, schedule = accelerator.prepare(*parts(fused=True))
    order = [0, 1, 3, 2, 5, 0]
    batches = [BATCHES[i] for i in order]
    lrs, skipped = train(accelerator, net, optimizer, schedule, "value", batches)
    assert lrs == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert skipped == [False, False, False, True, True, False]  # until the next one steps
    windows = [[batches[0], batches[1]], [batches[4], batches[5]]]
    assert_same(net, plain(windows, True, "value"))


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_clipping_sees_true_gradients_whatever_the_format(mixed_precision):
    accelerator = begun(mixed_precision=mixed_precision)
    scaler = ours(accelerator)
    net, optimizer, _ = accelerator.prepare(*parts())
    x, factor = BATCHES[0]
    accelerator.backward(loss_of(net(x), factor))
    norm = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    assert norm.item() == pytest.approx(12.4, abs=0.1)
    grads = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert grads.norm().item() == pytest.approx(LIMIT, rel=1e-4)
    optimizer.step()
    assert scaler.result.stepped


# Several optimizers


def check_two(put, in_turn, by=None):
    accelerator = begun()
    put(accelerator)
    nets = [accelerator.prepare(make_net(seed)) for seed in (1, 2)]
    optimizers = [accelerator.prepare(make_optimizer(net)) for net in nets]
    skipped = []
    for x, factor in BATCHES:
        for net, optimizer, loud in zip(nets, optimizers, (factor, 1.0)):
            accelerator.backward(loss_of(net(x), loud))
            if in_turn:
                clip(accelerator, net, by)
                optimizer.step()
                optimizer.zero_grad()
        for net, optimizer in zip(nets, optimizers) if not in_turn else ():
            clip(accelerator, net, by)
            optimizer.step()
            optimizer.zero_grad()
        skipped.append([optimizer.step_was_skipped for optimizer in optimizers])
    assert skipped == [[bad, False] for bad in SKIPPED]
    assert_apart(nets, clip=by)
    return accelerator.scaler


@pytest.mark.parametrize("by", [None, "norm", "value"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_two_optimizers(in_turn, by):
    scaler = check_two(lambda a: ours(a, DYNAMIC), in_turn, by)
    assert scaler.state_dict()["scale"] == SCALE / 4


def test_with_accelerates_own_scaler_the_second_is_unscaled_by_a_scale_it_never_had():
    check_two(own, in_turn=True)
    with pytest.raises(AssertionError, match=r"0\.weight"):
        check_two(own, in_turn=False)


def test_a_step_without_a_loss_while_the_other_optimizer_waits():
    accelerator = begun()
    scaler = ours(accelerator, DYNAMIC)
    nets = [accelerator.prepare(make_net(seed)) for seed in (1, 2)]
    first, second = (accelerator.prepare(make_optimizer(net)) for net in nets)
    x, _ = BATCHES[0]
    accelerator.backward(loss_of(nets[0](x), 1.0) + loss_of(nets[1](x), 1.0))
    first.step()
    first.zero_grad()
    first.step()
    assert scaler.result.cause is Cause.NO_GRADIENTS
    second.step()
    assert scaler.result.stepped


def test_a_scale_that_moved_meanwhile_is_not_taken_out_of_the_others_gradients():
    accelerator = begun()
    ours(accelerator, DYNAMIC)
    nets = [accelerator.prepare(make_net(seed)) for seed in (1, 2)]
    first, second = (accelerator.prepare(make_optimizer(net)) for net in nets)
    x, _ = BATCHES[0]
    accelerator.backward(loss_of(nets[0](x), 1.0) + loss_of(nets[1](x), 1.0))
    next(nets[0].parameters()).grad.fill_(float("inf"))
    first.step()
    first.zero_grad()
    first.step()
    with pytest.raises(MisuseError, match="no loss was scaled"):
        second.step()


def test_the_last_step_is_recorded_too(tmp_path):
    """Though nobody stepped with what the generator's loss left in the other net."""
    accelerator = begun()
    with Journal(tmp_path / "run.jsonl") as journal:
        scaler = ours(accelerator, DYNAMIC, journal=journal)
        nets = [make_net(), torch.nn.Linear(1, 1)]
        nets = [accelerator.prepare(net) for net in nets]
        optimizer, _ = (accelerator.prepare(make_optimizer(net)) for net in nets)
        accelerator.backward(loss_of(nets[1](nets[0](BATCHES[0][0])), 1.0))
        optimizer.step()
        scaler.flush()
    assert len(read_journal(tmp_path / "run.jsonl").steps) == 1


def test_lbfgs_that_was_put_back_counts_as_skipped():
    accelerator = begun()
    ours(accelerator)
    net = make_net()
    lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    net, optimizer = accelerator.prepare(net, lbfgs)
    skipped = []
    for x, factor in (BATCHES[2], BATCHES[0]):

        def closure(x=x, factor=factor):
            optimizer.zero_grad()
            loss = loss_of(net(x), factor)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [True, False]


# Checkpoints


@pytest.mark.parametrize("rule", [GROWING, "auto"])
def test_a_run_that_was_saved_goes_on(rule, tmp_path):
    accelerator = begun()
    undisturbed = ours(accelerator, rule)
    whole = accelerator.prepare(*parts(fused=True))
    train(accelerator, *whole)
    accelerator.save_state(tmp_path)
    expected = train(accelerator, *whole)
    accelerator = begun()
    scaler = ours(accelerator, rule)
    resumed = accelerator.prepare(*parts(fused=True))
    accelerator.load_state(tmp_path)
    assert scaler.skipped_steps > 0
    assert train(accelerator, *resumed) == expected
    assert_same(resumed[0], whole[0])
    assert scaler.state_dict() == undisturbed.state_dict()


def test_a_checkpoint_of_accelerates_own_scaler_is_read(tmp_path):
    accelerator = begun()
    own(accelerator)
    train(accelerator, *accelerator.prepare(*parts()))
    accelerator.save_state(tmp_path)
    accelerator = begun()
    scaler = ours(accelerator, "dynamic")
    accelerator.prepare(*parts())
    accelerator.load_state(tmp_path)
    assert scaler.get_scale() == SCALE / 4


def test_accelerates_own_scaler_reads_a_checkpoint_of_ours(tmp_path):
    accelerator = begun()
    ours(accelerator, DYNAMIC)
    train(accelerator, *accelerator.prepare(*parts()))
    accelerator.save_state(tmp_path)
    accelerator = begun()
    own(accelerator)
    accelerator.prepare(*parts())
    accelerator.load_state(tmp_path)
    assert accelerator.scaler.get_scale() == SCALE / 4


def test_copies_stand_alone():
    scaler = ours(begun(), DYNAMIC)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        net = make_net()
        optimizer = make_optimizer(net)
        other.scale(loss_of(net(BATCHES[0][0]), 1.0)).backward()
        other.step(optimizer)
        other.update()
        assert other.result.stepped


# Settings


def test_scaler_settings_of_accelerate_count():
    handler = GradScalerKwargs(init_scale=256.0, growth_interval=7)
    scaler = install(begun(kwargs_handlers=[handler]))
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (256.0, 7)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_shards_or_scales_by_itself_is_refused(kind):
    accelerator = begun()
    accelerator.state.distributed_type = DistributedType(kind)
    with pytest.raises(SettingsError, match=f"uses {kind}, which shards"):
        install(accelerator)
    assert accelerator.scaler is None


def test_skipping_together_is_refused():
    with pytest.raises(SettingsError, match="skip='all'"):
        install(begun(), skip="all")
