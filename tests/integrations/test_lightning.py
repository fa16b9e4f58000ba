"""Lightning's Trainer with gradlift's plugin, and what Lightning's own one does with the same."""

import copy
import csv
import logging
import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision as Own
from story import (
    BATCHES,
    CLEAN,
    DYNAMIC,
    FACTORS,
    GROWING,
    LIMIT,
    LRS,
    RULE,
    SCALE,
    SKIPPED,
    assert_apart,
    assert_same,
    clip_,
    loss_of,
    make_net,
    make_optimizer,
    make_schedule,
    plain,
    torch_scaler,
    true_gradients,
)

from gradlift import Journal, read_journal
from gradlift.errors import MisuseError, SettingsError, TrainingHalted
from gradlift.integrations.lightning import MixedPrecision

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def ours(rule=RULE, **settings):
    return MixedPrecision("16-mixed", "cpu", rule=rule, **settings)


def own():
    return Own("16-mixed", "cpu", torch_scaler())


class Net(pl.LightningModule):
    def __init__(self, fused=False, interval="step"):
        super().__init__()
        self.net, self.fused, self.interval = make_net(), fused, interval
        self.lrs = []

    def training_step(self, batch, index):
        x, factor = batch
        self.lrs.append(self.optimizers().param_groups[0]["lr"])
        return loss_of(self.net(x), factor)

    def configure_optimizers(self):
        optimizer = make_optimizer(self.net, self.fused)
        schedule = {"scheduler": make_schedule(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class loaded(torch.utils.data.DataLoader):
    """Batches as they are; one that goes on in the middle of an epoch."""

    def __init__(self, batches):
        super().__init__(batches, batch_size=None)
        self.begun = 0

    def __iter__(self):
        for batch in self.dataset[self.begun % len(self) :]:
            self.begun += 1
            yield batch

    def state_dict(self):
        return {"begun": self.begun}

    def load_state_dict(self, state):
        self.begun = state["begun"]


def fit(module, plugin, batches=BATCHES, ckpt_path=None, **settings):
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **settings}
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )
    trainer.fit(module, loaded(batches), ckpt_path=ckpt_path, weights_only=False)
    return trainer


# The story


def story(plugin, fused, clip):
    module = Net(fused)
    clipping = {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": clip} if clip else {}
    fit(module, plugin, **clipping)
    return module


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflowed_leaves_weights_and_schedule(fused, clip):
    plugin = ours()
    module = story(plugin, fused, clip)
    assert module.lrs == LRS
    assert_same(module.net, plain(CLEAN, fused, clip), exact=clip != "norm")
    assert plugin.scaler.skipped_steps == sum(SKIPPED)


@pytest.mark.parametrize(
    ("fused", "clip"), [(False, None), (False, "norm"), (False, "value"), (True, None)]
)
def test_with_lightnings_own_scaler_the_schedule_moves_on(fused, clip):
    module = story(own(), fused, clip)
    assert module.lrs == [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625] != LRS
    with pytest.raises(AssertionError):
        assert_same(module.net, plain(CLEAN, fused, clip), exact=clip != "norm")


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_lightnings_own_scaler_refuses_to_clip_a_fused_optimizer(clip):
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        story(own(), True, clip)


def test_without_a_plugin_a_cpu_gets_bfloat16():
    trainer = pl.Trainer(accelerator="cpu", precision="16-mixed", logger=False)
    assert trainer.precision_plugin.precision == "bf16-mixed"


@pytest.mark.parametrize("fused", [False, True])
def test_accumulation_an_overflow_costs_its_window(fused):
    module = Net(fused)
    order = [0, 1, 3, 2, 5, 0, 1]  # two clean, one that overflows, two clean, one left over
    fit(module, ours(), [BATCHES[i] for i in order], accumulate_grad_batches=2)
    assert module.lrs == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125]
    expected = make_net()
    optimizer = make_optimizer(expected, fused)
    schedule = make_schedule(optimizer)
    for window, share in (([0, 1], 1), ([5, 0], 1), ([1], 2)):  # Lightning divides by two always
        true_gradients(expected, [BATCHES[i] for i in window])
        for p in expected.parameters():
            p.grad /= share
        optimizer.step()
        schedule.step()
    assert_same(module.net, expected)


# Schedules


def test_a_schedule_in_epochs_goes_on():
    module = Net(interval="epoch")
    fit(module, ours(), BATCHES[:5], max_epochs=2)  # the last one is skipped
    assert module.lrs == [0.5] * 5 + [0.25] * 5


def test_the_users_own_hook_is_called_for_applied_steps():
    calls, module = [], Net()

    def step(scheduler, metric):
        calls.append(scheduler)
        scheduler.step()

    module.lr_scheduler_step = step
    for plugin in (ours(), ours()):
        fit(module, plugin)
    assert (len(calls), module.lrs) == (8, LRS * 2)
    assert module.lr_scheduler_step is step


def test_a_copy_of_the_module_made_in_training_trains_like_any_other():
    class Copying(pl.Callback):
        def on_train_start(self, trainer, module):
            self.copy = copy.deepcopy(module)

        def on_before_optimizer_step(self, trainer, module, optimizer):
            copy.deepcopy(module)

    module, copying = Net(), Copying()
    fit(module, ours(), callbacks=[copying])
    assert module.lrs == LRS
    fit(copying.copy, ours())
    assert copying.copy.lrs == LRS
    assert_same(copying.copy.net, module.net)


def test_a_plateau_schedule_in_steps_holds_too():
    class Plateau(Net):
        def configure_optimizers(self):
            optimizer = make_optimizer(self.net)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            told = {"interval": "step", "monitor": "same", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **told}}

        def training_step(self, batch, index):
            self.log("same", 1.0)
            return super().training_step(batch, index)

    module = Plateau()
    fit(module, ours())
    assert module.lrs == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


# What hooks see, and batches without a loss


def check_hooks_see_true_gradients(plugin, fused):
    class Watching(Net):
        def on_before_optimizer_step(self, optimizer):
            self.seen = [p.grad.clone() for p in self.net.parameters()]

    module = Watching(fused)
    fit(module, plugin, BATCHES[:1])
    expected = make_net()
    true_gradients(expected, BATCHES[:1])
    for grad, p in zip(module.seen, expected.parameters(), strict=True):
        assert torch.equal(grad, p.grad)
    assert_same(module.net, plain([BATCHES[:1]], fused))


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_see_true_gradients(fused):
    check_hooks_see_true_gradients(ours(), fused)


def test_with_lightnings_own_scaler_hooks_see_scaled_ones_of_a_fused_optimizer():
    check_hooks_see_true_gradients(own(), False)
    with pytest.raises(AssertionError):
        check_hooks_see_true_gradients(own(), True)


def test_a_callback_and_own_clipping_see_true_gradients_too():
    class Clipping(Net):
        def configure_gradient_clipping(self, optimizer, *_, **__):
            clip_(self.net, "value")

    class Looking(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            clip_(module.net, "value")

    first, second = Clipping(fused=True), Net(fused=True)
    fit(first, ours())
    fit(second, ours(), callbacks=[Looking()])
    assert_same(first.net, plain(CLEAN, True, "value"))
    assert_same(second.net, plain(CLEAN, True, "value"))


def test_a_training_step_without_a_loss_steps_nothing():
    class Skipping(Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return None if index == 1 else loss

    module = Skipping()
    fit(module, ours(), gradient_clip_val=LIMIT, gradient_clip_algorithm="value")
    assert module.lrs == [0.5, 0.25, 0.25, 0.25, 0.125, 0.125]
    assert_same(module.net, plain([CLEAN[i] for i in (0, 2, 3)], clip="value"))


def test_weight_averaging_with_batch_norm_ends_with_the_average():
    """Its last epoch goes through the data for batch norm alone, and ends with a step call."""

    class Normed(Net):
        def __init__(self):
            super().__init__(interval="epoch")
            self.net.insert(1, torch.nn.BatchNorm1d(8))

    module, averaging = Normed(), StochasticWeightAveraging(0.125, swa_epoch_start=1)
    fit(module, ours(), max_epochs=3, callbacks=[averaging])
    average = averaging._average_model
    assert_same(module.net, average.net)


# Manual optimization


class Two(pl.LightningModule):
    """Two nets, each with its optimizer; the second factor of a batch is for the second net."""

    def __init__(self, fused=False, clip=None):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = make_net(1), make_net(2)
        self.fused, self.clip = fused, clip
        self.stepped = []

    def configure_optimizers(self):
        return [make_optimizer(self.a, self.fused), make_optimizer(self.b, self.fused)]

    def done(self, optimizer):
        if self.clip:
            self.clip_gradients(optimizer, LIMIT, self.clip)
        optimizer.step()
        result = getattr(self.trainer.precision_plugin.scaler, "result", None)
        self.stepped.append(result is not None and result.stepped)


class Together(Two):
    def training_step(self, batch, index):
        x, factor = batch
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss_of(self.a(x), factor))
        self.manual_backward(loss_of(self.b(x), 1.0))
        self.done(first)
        self.done(second)


class InTurn(Two):
    def training_step(self, batch, index):
        x, factor = batch
        for net, optimizer, loud in zip((self.a, self.b), self.optimizers(), (factor, 1.0)):
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(loss_of(net(x), loud))
                self.done(optimizer)


class WithClosures(Two):
    def training_step(self, batch, index):
        x, factor = batch
        for net, optimizer, loud in zip((self.a, self.b), self.optimizers(), (factor, 1.0)):

            def closure(net=net, optimizer=optimizer, loud=loud):
                optimizer.zero_grad()
                self.manual_backward(loss_of(net(x), loud))

            optimizer.step(closure=closure)


def check_two(kind, plugin, fused=False, clip=None):
    module = kind(fused, clip)
    fit(module, plugin)
    assert_apart((module.a, module.b), fused, clip, exact=clip != "norm")
    return module


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Together, InTurn])
def test_manual_optimization_of_two_nets(kind, fused, clip):
    plugin = ours(DYNAMIC)
    module = check_two(kind, plugin, fused, clip)
    assert module.stepped == [s for bad in SKIPPED for s in (not bad, True)]
    assert plugin.state_dict()["scale"] == SCALE / 4


@pytest.mark.parametrize("fused", [False, True])
def test_manual_optimization_with_closures(fused):
    plugin = ours(DYNAMIC)
    check_two(WithClosures, plugin, fused)
    assert plugin.state_dict()["scale"] == SCALE / 4


def test_with_lightnings_own_scaler_the_second_net_is_unscaled_by_a_scale_it_never_had():
    check_two(InTurn, own())
    with pytest.raises(AssertionError):
        check_two(Together, own())


def test_with_lightnings_own_scaler_manual_clipping_clips_scaled_gradients():
    with pytest.raises(AssertionError):
        check_two(InTurn, own(), clip="norm")


# Optimizers that take a closure


class Newton(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.net.parameters(), lr=0.5, max_iter=4)


def test_lbfgs_trains_and_is_put_back_after_an_overflow():
    module, plugin = Newton(), ours()
    fit(module, plugin, [*BATCHES[:3], BATCHES[5]], gradient_clip_val=100.0)
    assert plugin.scaler.skipped_steps == 1
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    for batch in (BATCHES[0], BATCHES[1], BATCHES[5]):

        def closure(batch=batch):
            true_gradients(net, [batch])
            with torch.no_grad(), torch.autocast("cpu", torch.float16):
                return loss_of(net(batch[0]), batch[1])

        optimizer.step(closure)
    assert_same(module.net, net)


def test_lbfgs_is_clipped_by_value():
    module, plugin = Newton(), ours()
    fit(module, plugin, BATCHES[:1], gradient_clip_val=0.01, gradient_clip_algorithm="value")
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)

    def closure():
        true_gradients(net, BATCHES[:1])
        for p in net.parameters():
            p.grad.clamp_(-0.01, 0.01)
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            return loss_of(net(BATCHES[0][0]), BATCHES[0][1])

    optimizer.step(closure)
    assert plugin.scaler.skipped_steps == 0
    assert_same(module.net, net)


def test_lbfgs_shows_true_gradients_to_hooks():
    class Clipping(Newton):
        def on_before_optimizer_step(self, optimizer):
            clip_(self.net, "value")

    modules = Clipping(), Newton()
    fit(modules[0], ours(), BATCHES[:2])
    clipping = {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": "value"}
    fit(modules[1], ours(), BATCHES[:2], **clipping)
    assert_same(modules[0].net, modules[1].net)


def test_lightnings_own_refuses_lbfgs():
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="LBFGS"):
        fit(Newton(), own())


# Checkpoints


class Remember(pl.Callback):
    """The scaler's numbers at each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, *_):
        scaler = trainer.precision_plugin.scaler
        self.seen.append((scaler.get_scale(), scaler.skipped_steps, scaler._get_growth_tracker()))


def test_a_resumed_run_is_the_undisturbed_one(tmp_path):
    whole, seen = Net(True), Remember()
    fit(whole, ours(GROWING), max_epochs=2, callbacks=[seen])
    half = Net(True)
    saving = ModelCheckpoint(tmp_path, filename="half", every_n_epochs=1)
    fit(half, ours(GROWING), enable_checkpointing=True, callbacks=[saving])
    resumed, again, plugin = Net(True), Remember(), ours(GROWING)
    fit(resumed, plugin, max_epochs=2, ckpt_path=tmp_path / "half.ckpt", callbacks=[again])
    assert again.seen == seen.seen[6:]
    assert len(set(seen.seen)) > 6
    assert_same(resumed.net, whole.net)
    assert half.lrs + resumed.lrs == whole.lrs


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_resumed_in_the_middle_of_an_epoch(accumulate, tmp_path):
    windows = {"accumulate_grad_batches": accumulate}
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = Net(True)
    fit(whole, ours(GROWING), enable_checkpointing=True, callbacks=[saving], **windows)
    for step in range(1, 6 // accumulate):
        resumed = Net(True)
        fit(resumed, ours(GROWING), ckpt_path=tmp_path / f"step={step}.ckpt", **windows)
        assert resumed.lrs == whole.lrs[step * accumulate :]
        assert_same(resumed.net, whole.net)


def test_lightnings_own_scaler_reads_a_checkpoint_of_ours(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="ours", every_n_epochs=1)
    fit(Net(), ours(DYNAMIC), enable_checkpointing=True, callbacks=[saving])
    theirs, seen = own(), Remember()
    theirs.scaler.skipped_steps = 0
    fit(Net(), theirs, max_epochs=2, ckpt_path=tmp_path / "ours.ckpt", callbacks=[seen])
    assert seen.seen[0][0] == SCALE / 4


def test_validation_first_and_a_second_fit_of_the_same_trainer():
    class Validated(Net):
        def validation_step(self, batch, index):
            return loss_of(self.net(batch[0]), 1.0)

    module, plugin = Validated(), ours(DYNAMIC)
    trainer = fit(module, plugin)
    trainer.validate(module, loaded(BATCHES), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loaded(BATCHES), loaded(BATCHES))
    assert (module.lrs, plugin.scaler.skipped_steps) == (LRS * 2, 4)


def test_a_checkpoint_of_lightnings_own_scaler_is_read(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="own", every_n_epochs=1)
    theirs = own()
    fit(Net(), theirs, enable_checkpointing=True, callbacks=[saving])
    plugin, seen = ours("dynamic"), Remember()
    fit(Net(), plugin, max_epochs=2, ckpt_path=tmp_path / "own.ckpt", callbacks=[seen])
    assert seen.seen[0][0] == theirs.scaler.get_scale() == SCALE / 4


# Logging, journal, limits


def test_scale_and_skips_are_logged(tmp_path):
    trainer = fit(Net(), ours(DYNAMIC), logger=CSVLogger(tmp_path))
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["loss_scale"]) for r in rows] == [1024, 1024, 1024, 512, 512, 256]
    assert [float(r["skipped_steps"]) for r in rows] == [0, 0, 1, 1, 2, 2]
    assert trainer.callback_metrics["skipped_steps"] == 2


def test_a_step_at_the_end_of_an_epoch_where_lightning_allows_no_logging():
    class Collecting(Two):
        def training_step(self, batch, index):
            self.manual_backward(loss_of(self.a(batch[0]), 1.0) / 2)

        def on_train_epoch_end(self):
            self.optimizers()[0].step()

    module = Collecting()
    fit(module, ours(), BATCHES[:2])
    assert_same(module.a, plain([BATCHES[:2]]))


def test_a_journal_names_the_culprits_as_lightning_does(tmp_path):
    with Journal(tmp_path / "run.jsonl") as journal:
        fit(Net(), ours(journal=journal))
    run = read_journal(tmp_path / "run.jsonl")
    assert [step.verdict.name != "APPLY" for step in run.steps] == SKIPPED
    assert [step.lr for step in run.steps] == LRS
    assert run.steps[2].culprits[0].split()[0] == "net.2.bias"
    assert all(math.isfinite(step.loss) for step in run.steps)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("loud", [3, 6])
def test_a_limit_ends_the_fit_and_the_next_is_like_any_other(loud, on_device):
    """A device tells one step later, after the last one when the fit ends."""
    module, plugin = Net(fused=True), ours(max_consecutive_skips=2)
    plugin.scaler._force_device_path = on_device
    with pytest.raises(TrainingHalted, match="3 steps in a row"):
        fit(module, plugin, [BATCHES[2]] * loud)
    fit(module, ours())
    assert module.lrs[-6:] == LRS


def test_the_last_step_is_recorded_too(tmp_path):
    """Though nobody stepped with what the generator's loss left in the other net."""

    class Adversarial(Two):
        def training_step(self, batch, index):
            first, _ = self.optimizers()
            first.zero_grad()
            self.manual_backward(loss_of(self.b(self.a(batch[0]).expand(-1, 4)), 1.0))
            first.step()

    with Journal(tmp_path / "run.jsonl") as journal:
        fit(Adversarial(), ours(journal=journal))
    assert len(read_journal(tmp_path / "run.jsonl").steps) == 6


# Formats and settings


def test_bfloat16_has_no_scaler_and_clips_fused_optimizers():
    plugin = MixedPrecision("bf16-mixed", "cpu")
    assert plugin.scaler is None
    module = Net(fused=True)
    fit(module, plugin, gradient_clip_val=LIMIT)
    assert not any(torch.equal(a, b) for a, b in zip(module.parameters(), make_net().parameters()))
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Net(fused=True), Own("bf16-mixed", "cpu"), gradient_clip_val=LIMIT)


def test_off_scales_nothing():
    module = Net()
    fit(module, ours("off"), [b for b in BATCHES if b[1] == 1.0])
    assert_same(module.net, plain(CLEAN))


def test_settings_that_cannot_work():
    with pytest.raises(SettingsError, match=r"'bf16-mixed' has no scaler, so that journal, rule"):
        MixedPrecision("bf16-mixed", "cpu", rule="auto", journal=None)
    with pytest.raises(SettingsError, match="skip='all'"):
        ours(skip="all")
    with pytest.raises(ValueError, match="16-true"):
        MixedPrecision("16-true", "cpu")


def test_a_loss_on_another_device_is_an_error():
    with pytest.raises(MisuseError, match=r"made for 'cpu', .* the loss is on 'meta'"):
        ours().scaler.scale(torch.zeros((), device="meta"))


def test_the_trainers_plugin_in_fabric():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[ours()])
    net = fabric.setup(make_net())
    with pytest.raises(MisuseError, match=r"gradlift\.integrations\.fabric"):
        fabric.backward(loss_of(net(BATCHES[0][0]), FACTORS[0]))
