"""Two processes with DDP, under Accelerate and then under Lightning; each tells what it saw.

Only the second of them has batches that overflow.
"""

import json
import logging
import multiprocessing
import os
import socket
import sys

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from story import BATCHES, DYNAMIC, loss_of, make_optimizer, make_schedule, parts

from gradlift import Journal
from gradlift.integrations.accelerate import install
from gradlift.integrations.lightning import MixedPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def weights(net):
    return [p.flatten().tolist() for p in net.parameters()]


def accelerate(rank, journal):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    net, optimizer, schedule = accelerator.prepare(*parts(fused=True))
    scaler = install(accelerator, DYNAMIC, journal=journal)
    skipped = []
    for x, factor in BATCHES:
        accelerator.backward(loss_of(net(x), factor if rank else 1.0))
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return skipped, scaler.get_scale(), weights(net)


class Net(pl.LightningModule):
    def __init__(self, rank):
        super().__init__()
        self.net, *_ = parts()
        self.rank, self.lrs = rank, []

    def training_step(self, batch, index):
        x, factor = batch
        self.lrs.append(self.optimizers().param_groups[0]["lr"])
        return loss_of(self.net(x), factor if self.rank else 1.0)

    def configure_optimizers(self):
        optimizer = make_optimizer(self.net, fused=True)
        schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def lightning(rank, journal):
    plugin, module = MixedPrecision("16-mixed", "cpu", rule=DYNAMIC, journal=journal), Net(rank)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        plugins=[plugin],
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return module.lrs, plugin.scaler.get_scale(), weights(module)


def work(rank, port):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    told = {}
    for run in (accelerate, lightning):
        with Journal(f"{run.__name__}.jsonl") as journal:
            told[run.__name__] = run(rank, journal)
    with open(f"{rank}.json", "w") as file:
        json.dump(told, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")  # what was imported is there already
    jobs = [fork.Process(target=work, args=(rank, port)) for rank in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    sys.exit(any(job.exitcode for job in jobs))
