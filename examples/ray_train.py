"""FP16 with gradlift on two Ray workers: Ray Train's TorchTrainer, DDP, one scaler a worker.

    python examples/ray_train.py                   # two workers on this machine

The workers decide together (`process_group=`): an overflow that only one of them sees makes both
skip, at the same scale. Rank 0 keeps the journal; what is reported to Ray is told once a round.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from gradlift import Journal
from gradlift.torch import GradScaler


def train(config: dict) -> None:
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(
        "cpu",
        rule=config["rule"],
        process_group=dist.group.WORLD,
        journal=Journal(config["journal"]) if rank == 0 else None,
    )
    first = 0
    if checkpoint := ray.train.get_checkpoint():  # Ray starts workers again after a failure
        with checkpoint.as_directory() as folder:
            held = torch.load(os.path.join(folder, "all.pt"))
        net.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        scaler.load_state_dict(held["scaler"])
        first = held["step"]
    for step in range(first, config["steps"]):
        data = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(64, 16, generator=data)
        y = x.sin().sum(1, keepdim=True)
        if step == 5 and rank == 1:
            y = y * 1e6  # one bad batch, on one worker
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = torch.nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        if (step + 1) % 20 == 0:
            scaler.assert_in_sync()
            told = {"step": step + 1, "loss": loss.item(), "scale": scaler.get_scale()}
            told["skipped"] = scaler.skipped_steps
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    parts = {"model": net, "optimizer": optimizer, "scaler": scaler}
                    held = {name: part.state_dict() for name, part in parts.items()}
                    torch.save({**held, "step": step + 1}, os.path.join(folder, "all.pt"))
                kept = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report(told, checkpoint=kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rule", default="auto")
    parser.add_argument("--journal", default=os.path.join("gradlift-runs", "ray.jsonl"))
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        trainer = TorchTrainer(
            train,
            train_loop_config={**vars(options), "journal": os.path.abspath(options.journal)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=tempfile.mkdtemp(prefix="ray-"),
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        print(json.dumps(trainer.fit().metrics))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
