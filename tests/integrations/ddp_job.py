"""Two processes under Lightning's DDP; each prints its learning rates, skips and weights."""

import json
import logging

import lightning.pytorch as pl
import torch
from story import BATCHES, loss_of, make_net, make_optimizer, make_schedule

from gradlift.integrations.lightning import MixedPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.lrs = []

    def training_step(self, batch, index):
        x, factor = batch
        self.lrs.append(self.optimizers().param_groups[0]["lr"])
        return loss_of(self.net(x), factor if self.global_rank == 1 else 1.0)

    def configure_optimizers(self):
        optimizer = make_optimizer(self.net, fused=True)
        schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_end(self):
        skipped = self.trainer.precision_plugin.scaler.skipped_steps
        weights = [p.flatten().tolist() for p in self.parameters()]
        print(json.dumps([self.lrs, skipped, weights]) + "\n", end="", flush=True)


if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        plugins=[MixedPrecision("16-mixed", "cpu", rule="dynamic:init_scale=2^10")],
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(BATCHES, batch_size=None))
