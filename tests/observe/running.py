"""Scripts in processes of their own: plain, and under `gradlift run`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"
PYTHON = (sys.executable,)
GRADLIFT = (sys.executable, "-m", "gradlift")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

# One small training loop; `step(factor)` multiplies the loss.
SMALL = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
def step(factor=1.0):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 4)).square().mean() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

# What must not differ by a bit: weights, states of optimizers and scalers, random numbers.
END = """
def everything(*things):
    import hashlib, numpy, random
    found = hashlib.sha256()
    def add(x):
        if isinstance(x, torch.Tensor):
            found.update(f"{x.dtype}{tuple(x.shape)}".encode())
            found.update(x.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(x, dict):
            for key in x:
                add(str(key)), add(x[key])
        elif isinstance(x, (list, tuple)):
            for each in x:
                add(each)
        else:
            found.update(repr(x).encode())
    for thing in things:
        add(thing.state_dict() if hasattr(thing, "state_dict") else thing)
    grads = [p.grad for t in things if isinstance(t, torch.nn.Module) for p in t.parameters()]
    add([torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()), grads])
    print("everything", found.hexdigest())
"""


def start(*words, cwd, by=GRADLIFT):
    return subprocess.Popen(
        [*by, *map(str, words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )


def ended(process):
    process.out, process.err = process.communicate(timeout=150)
    return process


def gradlift(*words, cwd, by=GRADLIFT):
    return ended(start(*words, cwd=cwd, by=by))


def torchrun(*words, cwd):
    """A job of several ranks. Whatever the script, torch's own threads now and then abort an
    interpreter that is ending: such a job is started again."""
    for _ in range(3):
        done = ended(start(*words, cwd=cwd, by=TORCHRUN))
        if "terminate called without an active exception" not in done.err:
            break
        shutil.rmtree(cwd / "gradlift-runs", ignore_errors=True)
    return done


def recorded(folder):
    (run,) = (folder / "gradlift-runs").iterdir()
    return run
