"""transformers.Trainer with gradlift's callback, and with the scaler it has on a GPU."""

import pytest
import torch
from story import DYNAMIC, GROWING, SCALE, torch_scaler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from gradlift import Journal, read_journal
from gradlift.errors import TrainingHalted
from gradlift.integrations.transformers import ScaleCallback

LOUD = 2.0**20  # scaled by this as well, the gradient of the logits leaves float16
DATA = [
    {"input_ids": row, "labels": row, "factor": torch.tensor(LOUD if i in (2, 4) else 1.0)}
    for i, row in enumerate(torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(0)))
]


class Model(GPT2LMHeadModel):
    """A GPT-2 of one layer with random weights, whose loss a batch can make loud."""

    def forward(self, input_ids, labels, factor):
        self.heard = [*getattr(self, "heard", []), float(factor.max())]
        output = super().forward(input_ids, labels=labels)
        return {"loss": output.loss * factor.max()}


class Recorder(TrainerCallback):
    """After each step: was it loud, did the weights move, and what is the learning rate now?"""

    def __init__(self):
        self.lrs, self.moved = [], []

    def on_train_begin(self, args, state, control, model, **_):
        self.before = [p.detach().clone() for p in model.parameters()]

    def on_step_end(self, args, state, control, model, lr_scheduler, **_):
        after = [p.detach().clone() for p in model.parameters()]
        self.moved.append(not all(map(torch.equal, after, self.before)))
        self.before = after
        self.lrs.append(lr_scheduler.get_last_lr()[0])


def made(folder, put, data=DATA, eval_dataset=None, **settings):
    """A trainer of eight steps whose learning rate falls by an eighth with each, to zero."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "fp16": True,
            "use_cpu": True,
            "per_device_train_batch_size": 1,
            "num_train_epochs": 1,
            "learning_rate": 2.0**-6,
            "lr_scheduler_type": "linear",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **settings,
        }
    )
    trainer = Trainer(Model(config), arguments, train_dataset=data, eval_dataset=eval_dataset)
    recorder = Recorder()
    put(trainer)
    trainer.add_callback(recorder)
    return trainer, recorder


def ours(rule=DYNAMIC, **settings):
    return lambda trainer: trainer.add_callback(ScaleCallback(trainer, rule, **settings))


def own(trainer):
    """What Accelerate does by itself where there is a GPU."""
    trainer.accelerator.scaler = torch_scaler()
    trainer.accelerator.native_amp = True


def falling(moves):
    """The linear schedule's rate after each step if only these moved it."""
    return [2.0**-6 * (1 - sum(moves[: i + 1]) / 8) for i in range(len(moves))]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_step_that_overflowed_leaves_weights_and_schedule(optim, tmp_path):
    trainer, seen = made(tmp_path, ours(), optim=optim)
    trainer.train()
    quiet = [factor == 1.0 for factor in trainer.model.heard]
    assert quiet.count(False) == 2
    assert seen.moved == quiet
    assert seen.lrs == falling(quiet)
    assert trainer.accelerator.scaler.get_scale() == SCALE / 4


def test_with_the_trainers_own_scaler_the_schedule_moves_on(tmp_path):
    """The optimizer that it takes by itself is fused."""
    trainer, seen = made(tmp_path, own)
    assert trainer.args.optim == "adamw_torch_fused"
    trainer.train()
    assert seen.moved == [factor == 1.0 for factor in trainer.model.heard]
    assert seen.lrs == falling([True] * 8)


def test_scale_and_skips_stand_beside_the_loss(tmp_path):
    heard = []

    class Listener(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            heard.append("loss_scale" in logs)

    trainer, _ = made(tmp_path, lambda trainer: [trainer.add_callback(Listener), ours()(trainer)])
    trainer.train()
    *steps, end = trainer.state.log_history
    skips = [factor != 1.0 for factor in trainer.model.heard]
    skipped = [sum(skips[: i + 1]) for i in range(8)]
    assert [entry["skipped_steps"] for entry in steps] == skipped
    assert [entry["loss_scale"] for entry in steps] == [SCALE / 2**n for n in skipped]
    assert "loss_scale" not in end
    assert heard == [True] * 8 + [False]


@pytest.mark.parametrize("rule", [GROWING, "auto"])
def test_a_resumed_run_is_the_undisturbed_one(rule, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    whole, seen = made(tmp_path, ours(rule), **saving)
    whole.train()
    resumed, again = made(tmp_path, ours(rule), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.model.heard == whole.model.heard[4:]
    assert (again.lrs, again.moved) == (seen.lrs[4:], seen.moved[4:])
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    scalers = [trainer.accelerator.scaler.state_dict() for trainer in (resumed, whole)]
    assert scalers[0] == scalers[1]
    assert scalers[0]["gradlift"]["skipped"] == seen.moved.count(False) > 0


def test_accumulation_an_overflow_costs_its_window(tmp_path):
    trainer, seen = made(tmp_path, ours(), gradient_accumulation_steps=2)
    trainer.train()
    heard = trainer.model.heard
    quiet = [max(heard[i : i + 2]) == 1.0 for i in range(0, 8, 2)]
    assert seen.moved == quiet
    assert seen.lrs == [2.0**-6 * (1 - sum(quiet[: i + 1]) / 4) for i in range(4)]


def test_the_norm_that_is_logged_is_the_true_one(tmp_path):
    quiet = [entry for entry in DATA if entry["factor"] == 1.0]
    norms = []
    for rule in ("static:1024", "static:1"):
        trainer, _ = made(tmp_path, ours(rule), quiet)
        trainer.train()
        norms.append([e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_an_accelerator_that_was_made_anew_goes_on_too(tmp_path):
    """A search for hyperparameters makes one for every trial."""
    whole, _ = made(tmp_path, ours(), save_strategy="steps", save_steps=6)
    whole.train()
    trainer, _ = made(tmp_path, ours())
    first = trainer.accelerator.scaler
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator.scaler is not first
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert trainer.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert [e["skipped_steps"] for e in trainer.state.log_history[-3:-1]] == [2, 2]


def test_of_two_callbacks_the_last_counts(tmp_path):
    trainer, seen = made(tmp_path, lambda trainer: [ours("auto")(trainer), ours()(trainer)])
    trainer.train()
    *_, last, _ = trainer.state.log_history
    assert (last["loss_scale"], last["skipped_steps"]) == (SCALE / 4, 2)
    assert seen.moved.count(False) == 2


@pytest.mark.parametrize(("first", "then"), [(own, ours("dynamic")), (ours(), own)])
def test_checkpoints_go_from_one_scaler_to_the_other(first, then, tmp_path):
    trainer, _ = made(tmp_path, first, save_strategy="steps", save_steps=8)
    trainer.train()
    trainer, seen = made(tmp_path, then, num_train_epochs=2, max_steps=9)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert len(seen.moved) == 1
    assert trainer.accelerator.scaler.get_scale() in (SCALE / 4, SCALE / 8)


def test_without_clipping_and_with_the_best_model_at_the_end(tmp_path):
    trainer, seen = made(
        tmp_path,
        ours(),
        eval_dataset=DATA[:2],
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    trainer.evaluate()
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert seen.moved.count(False) == 2
    assert seen.lrs == falling(seen.moved)


def test_the_last_step_is_recorded_too(tmp_path):
    """A device tells one step later."""
    with Journal(tmp_path / "run.jsonl") as journal:
        trainer, _ = made(tmp_path, ours(journal=journal))
        trainer.accelerator.scaler._force_device_path = True
        trainer.train()
    assert len(read_journal(tmp_path / "run.jsonl").steps) == 8


def test_a_journal_and_a_limit(tmp_path):
    loud = [{**entry, "factor": torch.tensor(LOUD)} for entry in DATA]
    with Journal(tmp_path / "run.jsonl") as journal:
        put = ours("static:1024", max_consecutive_skips=3, journal=journal)
        trainer, seen = made(tmp_path, put, loud)
        with pytest.raises(TrainingHalted, match="4 steps in a row were skipped"):
            trainer.train()
    assert not any(seen.moved)
    steps = read_journal(tmp_path / "run.jsonl").steps
    assert [step.verdict.name for step in steps] == ["SKIP", "SKIP", "SKIP", "HALT"]
    assert all(step.culprits for step in steps)
