"""transformers.Trainer: a callback that puts gradlift's scaler into the trainer's accelerator."""

# ruff: noqa: E402 - the trainer is imported when its version is known to fit

from __future__ import annotations

from typing import Any

from .versions import require

require("transformers", "5.22", "6")

from transformers import Trainer, TrainerCallback

from ..rules import Rule
from .accelerate import install

__all__ = ["ScaleCallback"]


class ScaleCallback(TrainerCallback):
    """`trainer.add_callback(ScaleCallback(trainer, rule="auto"))`, before `train()`.

    The other settings are those of `gradlift.torch.GradScaler`. "loss_scale" and "skipped_steps"
    stand beside "loss" in everything that is logged; a checkpoint has the scaler in it.

    >>> import torch
    >>> from transformers import Trainer, TrainingArguments
    >>> arguments = TrainingArguments("out", fp16=True, use_cpu=True, report_to=[])
    >>> trainer = Trainer(torch.nn.Linear(4, 1), arguments)
    >>> callback = ScaleCallback(trainer, rule="auto")
    >>> trainer.add_callback(callback)
    >>> trainer.accelerator.scaler is callback.scaler
    True
    """

    def __init__(
        self, trainer: Trainer, rule: Rule | str | float | None = None, **settings: Any
    ) -> None:
        self._trainer, self._rule, self._settings = trainer, rule, settings
        self._create, self._log = trainer.create_accelerator_and_postprocess, trainer.log
        trainer.create_accelerator_and_postprocess = self._create_more  # type: ignore[method-assign]
        trainer.log = self._log_more  # type: ignore[method-assign]
        install(trainer.accelerator, rule, **settings)

    @property
    def scaler(self) -> Any:
        """The one in use."""
        return self._trainer.accelerator.scaler

    def _create_more(self) -> None:
        """A search for hyperparameters makes a new accelerator for each trial."""
        self._create()
        install(self._trainer.accelerator, self._rule, **self._settings)

    def _log_more(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """In `on_log` it would be too late for callbacks that come before this one."""
        if "loss" in logs:
            skipped = self.scaler.skipped_steps
            logs = {**logs, "loss_scale": self.scaler.get_scale(), "skipped_steps": skipped}
        self._log(logs, *args, **kwargs)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.scaler.flush()
