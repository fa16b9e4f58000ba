"""Under `gradlift run` a script's output, weights, states and random numbers are those of the plain
run, to the bit; and the run is recorded."""

import pytest
from conformance.documents import snippets
from observe.running import END, PYTHON, ended, recorded, start, torchrun

from gradlift import Cause, Verdict, read_journal

HEAD = """
import numpy, random, sys, torch
from torch import nn
torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
def net(*sizes):
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1], nn.Dropout(0.1))
model = net(4, 8, 1)
"""

# A non-finite loss, a float16 loss and a scale that is no power of two, in one loop.
TORCH = """
optimizer = torch.optim.{optimizer}
scaler = {scaler}
for i in range(14):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 4)).square().mean()
    loss = loss.half() if i % 2 else loss.float()
    loss = loss * (float("nan") if i == 5 else float("inf") if i == 8 else 1.0)
    scaler.scale(loss).backward()
    {clip}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(i, loss.item(), scaler.get_scale())
everything(model, optimizer, scaler)
"""
CLIP = """scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"""

BARE = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for i in range(12):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled={bf16}):
        loss = model(torch.randn(4, 4)).float().square().mean()
    loss.backward()
    {clip}
    optimizer.step()
print(loss.item())
everything(model, optimizer)
"""

GAN = """
critic = net(1, 8, 1)
optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, critic)]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
for i in range(12):
    for optimizer, sign in zip(optimizers, (1, -1)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            made = critic(model(torch.randn(4, 4)))
        scaler.scale(sign * made.float().mean()).backward()
        scaler.step(optimizer)
    scaler.update()
    print(scaler.get_scale())
everything(model, critic, *optimizers, scaler)
"""

LBFGS = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x = torch.randn(8, 4)
for i in range(5):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    print(optimizer.step(closure).item())
everything(model, optimizer)
"""

OWN_LBFGS = """
from gradlift.torch import GradScaler
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
scaler = GradScaler("cpu", init_scale=2.0**30)
x = torch.randn(8, 4)
for i in range(8):
    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss * (float("nan") if i == 5 else 1.0)).backward()
        return loss
    scaler.step(optimizer, closure)
    scaler.update()
    print(scaler.result, scaler.get_scale())
everything(model, optimizer, scaler)
"""

TWO_BARE = """
other = net(4, 8, 1)
optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)]
for i in range(8):
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x) + other(x)).float().square().mean()
    (loss * (float("nan") if i == 5 else 1.0)).backward()
    nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())
everything(model, other, *optimizers)
"""

OWN = """
from gradlift.torch import GradScaler
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scaler = GradScaler("cpu", init_scale=1100.0)
for i in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(64, 4)).square().mean()
    loss = loss.half() if i % 2 else loss.float()
    scaler.scale(loss * (float("nan") if i == 5 else 1.0)).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    print(scaler.result)
everything(model, optimizer, scaler)
"""

ACCELERATE = """
from accelerate import Accelerator
from gradlift.integrations.accelerate import install
accelerator = Accelerator(mixed_precision="fp16", cpu=True)
install(accelerator, rule="auto")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
model, optimizer = accelerator.prepare(model, optimizer)
for i in range(8):
    loss = model(torch.randn(64, 4)).square().mean()
    accelerator.backward(loss * (float("nan") if i == 5 else 1.0))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale())
everything(model, optimizer, accelerator.scaler)
"""

LIGHTNING = """
import lightning
from gradlift.integrations.lightning import MixedPrecision
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, i):
        return self.net(batch).float().square().mean() * (float("nan") if i == 5 else 1.0)
    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return self.optimizer
module = Module()
trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    plugins=MixedPrecision("16-mixed", "cpu", rule="auto"),
)
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4))
everything(module, module.optimizer)
"""

FABRIC = """
import lightning
from gradlift.integrations.fabric import MixedPrecision
plugin = MixedPrecision("16-mixed", "cpu", init_scale=2.0**30)
fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
for i in range(8):
    fabric.backward(model(torch.randn(64, 4)).float().square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    print(plugin.scaler.get_scale())
everything(model, optimizer, plugin)
"""

ACCUMULATION = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for i in range(24):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 4)).float().square().mean() / 3
    scaler.scale(loss * (float("nan") if i == 7 else 1.0)).backward()
    if i % 3 == 2:
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        print(loss.item(), scaler.get_scale(), schedule.get_last_lr())
everything(model, optimizer, scaler, schedule)
"""

EMA = """
import copy
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
ema = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
)
teacher = copy.deepcopy(model).eval()
for i in range(12):
    optimizer.zero_grad()
    x = torch.randn(4, 4)
    with torch.no_grad():
        wanted = teacher(x)
    loss = (model(x) - wanted).square().mean() + 0.1 * (model(x) - ema(x)).abs().mean()
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
    print(loss.item(), ema.module[0].weight.sum().item())
everything(model, ema, teacher, optimizer)
"""

TORCHAO = """
from torchao.optim import AdamW8bit
torch.compiler.set_stance("force_eager")  # its step is compiled, which takes minutes
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64))
optimizer = AdamW8bit(model.parameters(), lr=1e-2, bf16_stochastic_round=True)
model.bfloat16()
for i in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64).bfloat16()).float().square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
states = [
    part.dequantize() if hasattr(part, "dequantize") else part
    for p in model.parameters() for _, part in sorted(optimizer.state[p].items())
]
everything(model, states)
"""

COMPILED = """
class Log(nn.Module):
    def forward(self, x, bad):
        return x + torch.log(x * 0 + 1 - bad)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.log = model, nn.BatchNorm1d(1), Log()
    def forward(self, x, bad):
        return self.log(self.norm(self.body(x)), bad)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
compiled = torch.compile(model, backend="{backend}")
for i in range(8):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = compiled(torch.randn(4, 4), torch.tensor(float(i == 3))).float().square().mean()
    scaler.scale(loss * (float("nan") if i == 5 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item(), scaler.get_scale())
print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
everything(model, optimizer, scaler)
"""

# A checkpoint brings its saved tensors back by running a part of the forward pass again.
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.calls = nn.Sequential(*model, nn.BatchNorm1d(1)), net(1, 1), 0
    def inner(self, x):
        self.calls += 1
        print("inner", self.calls)
        return self.body(x)
    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=False))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for i in range(10):
    optimizer.zero_grad()
    wanted = torch.randn(4, 1)
    wanted[2] = float("nan") if i == 4 else 0.0
    with torch.autocast("cpu", torch.float16):
        made = model(torch.randn(4, 4))
    loss = (made.float() - wanted).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(i, loss.item(), scaler.get_scale())
everything(model, optimizer, scaler)
"""

# The forward pass of the bad step draws random numbers of three kinds, moves buffers, and prints.
RERUN = """
import logging
logging.basicConfig(stream=sys.stdout)
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.count = nn.BatchNorm1d(8), 0
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        logging.getLogger().warning("logged %s", float(self.seen))
        self.calls = getattr(self, "calls", 0) + 1
        print("forward", float(self.seen), file=sys.stderr if x.sum() > 0 else sys.stdout)
        x = self.norm(x) * random.random() + numpy.random.rand() + torch.rand(())
        bad = self.calls in (4, 7)
        return torch.log(x * 0) * 0 if bad else x + ({zero})
model = nn.Sequential(nn.Linear(4, 8), Odd(), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for i in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 4)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(i, loss.item(), scaler.get_scale(), torch.rand(()), random.random(), numpy.random.rand())
everything(model, optimizer, scaler)
"""

# Trainers with the scaler of torch that they bring along.
PLAIN_ACCELERATE = ACCELERATE.replace(
    "from gradlift.integrations.accelerate import install\n", ""
).replace(
    'install(accelerator, rule="auto")',
    'accelerator.scaler = torch.amp.GradScaler("cpu", 2.0**10)',
)
PLAIN_LIGHTNING = LIGHTNING.replace(
    "gradlift.integrations.lightning", "lightning.pytorch.plugins"
).replace('"cpu", rule="auto"', '"cpu", torch.amp.GradScaler("cpu", 2.0**10)')
PLAIN_FABRIC = FABRIC.replace("gradlift.integrations.fabric", "lightning.fabric.plugins").replace(
    '"cpu", init_scale=2.0**30', '"cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10)'
)

# The first snippet of README.md, as a script.
_, README = next(snippets("python torch")).values
README += "everything(model, optimizer, scaler)\n"

SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def loop(optimizer="SGD(model.parameters(), lr=0.1)", scaler="2.0**20", clip=""):
    made = scaler if "(" in scaler else f'torch.amp.GradScaler("cpu", init_scale={scaler})'
    return TORCH.format(optimizer=optimizer, scaler=made, clip=clip)


FUSED = "AdamW(model.parameters(), lr=1e-2, fused=True)"
CASES = {  # script, steps, keys
    "torch": (loop(), 14, {""}),
    "odd scale, clipped": (loop(scaler="1100.0", clip=CLIP), 14, {""}),
    "fused": (loop(FUSED), 14, {""}),
    "sharded": (SHARDED + loop(scaler='ShardedGradScaler("cpu", 2.0**24)'), 14, {""}),
    "bfloat16": (BARE.format(bf16=True, clip=""), 12, {""}),
    "float32, clipped": (
        BARE.format(bf16=False, clip="nn.utils.clip_grad_value_(model.parameters(), 1e-3)"),
        12,
        {""},
    ),
    "two optimizers": (GAN, 12, {""}),
    "LBFGS": (LBFGS, 5, {""}),
    "LBFGS, gradlift": (OWN_LBFGS, 8, {""}),
    "two optimizers, no scaler": (TWO_BARE, 16, {"", "optimizer 2"}),
    "gradlift": (OWN, 20, {""}),
    "README": (README, 20, {""}),
    "accelerate": (ACCELERATE, 8, {""}),
    "lightning": (LIGHTNING, 8, {""}),
    "fabric": (FABRIC, 8, {""}),
    "accumulation": (ACCUMULATION, 8, {""}),
    "EMA": (EMA, 12, {""}),
    "torchao": (TORCHAO, 8, {""}),
    "compiled": (COMPILED.format(backend="aot_eager"), 8, {""}),
    "checkpointed": (CHECKPOINTED, 10, {""}),
    "run again": (RERUN.format(zero="0"), 12, {""}),
    "run again, backward": (RERUN.format(zero="(x * 0).sqrt() * (i > 7)"), 12, {""}),
    "accelerate with torch's scaler": (PLAIN_ACCELERATE, 8, {""}),
    "lightning with torch's scaler": (PLAIN_LIGHTNING, 8, {""}),
    "fabric with torch's scaler": (PLAIN_FABRIC, 8, {""}),
}


def both(script, folder, *options):
    """The script's plain process, and the one under `gradlift run`."""
    (folder / "train.py").write_text(script)
    started = [
        start("train.py", cwd=folder, by=PYTHON),
        start("run", *options, "train.py", cwd=folder),
    ]
    plain, run = map(ended, started)
    assert plain.returncode == 0, plain.err
    assert run.returncode == 0, run.err
    return plain, run


@pytest.mark.parametrize("case", CASES)
def test_nothing_differs_and_every_step_is_recorded(case, tmp_path):
    script, steps, keys = CASES[case]
    plain, run = both(HEAD + END + script, tmp_path, "--every", 3)
    assert run.out == plain.out
    assert "everything" in plain.out
    told = read_journal(recorded(tmp_path))
    assert len(told.steps) == steps
    assert {s.key for s in told.steps} == keys
    assert len(told.samples) >= steps // 3
    assert not [e for e in told.events if e.detail.get("code") == "observer"]
    for step in told.steps:
        assert step.nonfinite or step.amax > 0 or step.cause is not Cause.NONE, step
    if case in ("torch", "fused"):  # every second loss is float16
        causes = {s.step: s.cause for s in told.steps if s.skipped}
        assert causes[5] is causes[8] is Cause.LOSS_NONFINITE
        assert causes[1] is Cause.OVERFLOW  # 2^19, which float16 cannot hold
        assert [e.detail["code"] for e in told.events if e.what == "note"] == ["half-loss"]
    if case == "odd scale, clipped":
        assert told.steps[0].scale == 1100.0
        assert told.steps[5].culprits
        assert all(s.norm > 0.01 for s in told.steps if not s.skipped)  # as it was before
    if case == "LBFGS":
        losses = [float(line) for line in plain.out.splitlines()[:-1]]
        assert told.steps[-1].loss < losses[-1]  # of the last evaluation; step() returns the first
    if case in ("bfloat16", "float32, clipped", "LBFGS"):
        assert told.header["rule"] == "off"
        assert {s.verdict for s in told.steps} == {Verdict.APPLY}
        assert "you need none" in run.err or "scale" in run.err


def test_two_ranks_under_torchrun(tmp_path):
    ddp = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
torch.manual_seed(dist.get_rank())
for i in range(10):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = ddp(torch.randn(4, 4)).float().square().mean()
    scaler.scale(loss * (float("nan") if i == 5 and dist.get_rank() else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
sys.stdout = open(f"{sys.argv[1]}-{dist.get_rank()}", "w")
everything(model, optimizer, scaler)
dist.destroy_process_group()
"""
    (tmp_path / "train.py").write_text(HEAD + END + ddp)
    launch = "--standalone", "--nproc-per-node=2"
    plain = torchrun(*launch, "train.py", "plain", cwd=tmp_path)
    assert plain.returncode == 0, plain.err
    run = "-m", "gradlift", "run", "train.py", "run"
    done = torchrun(*launch, *run, cwd=tmp_path)
    assert done.returncode == 0, done.err
    for rank in "01":
        assert (tmp_path / f"run-{rank}").read_text() == (tmp_path / f"plain-{rank}").read_text()
    runs = [read_journal(recorded(tmp_path) / f) for f in ("journal.jsonl", "rank-1.jsonl")]
    told = [[(s.scale, s.verdict) for s in run.steps] for run in runs]
    assert told[0] == told[1]
    assert [len(r.steps) for r in runs] == [10, 10]
    # Rank 0 cannot know that it was rank 1's loss.
    assert runs[0].steps[5].cause is Cause.UNKNOWN_NONFINITE
    assert runs[1].steps[5].cause is Cause.LOSS_NONFINITE


def test_masters_and_compiled_code(tmp_path):
    script = """
from gradlift.torch import MasterWeights
half = net(4, 8, 1).half()
optimizer = MasterWeights(torch.optim.AdamW, half.parameters(), lr=1e-2)
from gradlift.torch import GradScaler
scaler = GradScaler("cpu", init_scale=2.0**10)
for i in range(6):
    optimizer.zero_grad()
    scaler.scale(half(torch.randn(4, 4).half()).float().square().mean()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
other = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile(backend="eager")
def train(x):
    other.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    other.step()
for i in range(6):
    train(torch.randn(4, 4))
everything(half, optimizer, scaler, model, other)
"""
    plain, run = both(HEAD + END + script, tmp_path)
    assert run.out == plain.out
    told = read_journal(recorded(tmp_path))
    assert [s.step for s in told.steps if not s.key] == list(range(6))
    assert not [e for e in told.events if e.detail.get("code") == "observer"]
