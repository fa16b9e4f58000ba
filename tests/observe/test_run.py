"""`gradlift run` on scripts that know nothing of gradlift: as `python` would run them."""

import json
import signal
import socket
import time

import pytest
from observe.running import PYTHON, SCRIPTS, SMALL, TORCHRUN, gradlift, recorded, start, torchrun

from gradlift import Cause, Verdict, read_journal
from gradlift.analysis.source import line_at, source_of

# A suite that was started in the background ignores Ctrl-C, and its children would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

LOOPS = ["gpt_loop.py", "image_loop.py", "gan_loop.py"]


@pytest.mark.parametrize("script", LOOPS)
def test_the_output_of_an_unchanged_script_is_the_plain_runs(script, tmp_path):
    plain = gradlift(SCRIPTS / script, cwd=tmp_path, by=PYTHON)
    assert plain.out.count("weights") == 1, plain.err
    done = gradlift("run", "--every", 5, SCRIPTS / script, cwd=tmp_path)
    assert done.returncode == 0, done.err
    assert done.out == plain.out
    folder = recorded(tmp_path)
    assert {f.name for f in folder.iterdir()} == {"journal.jsonl", "report.html", "command.json"}
    run = read_journal(folder)
    assert run.header["mode"] == "run"
    assert run.samples
    assert len(run.steps) >= 30
    assert run.skipped > 0  # each of them starts at a scale that overflows
    first = next(s for s in run.steps if s.culprits)
    assert first.culprits[0] in run.header["parameters"]
    assert str(folder / "report.html") in done.err
    assert len(done.err.splitlines()) < 20


def test_two_nets_with_the_same_names_are_kept_apart(tmp_path):
    words = ["-q", "--no-report", "--every", 1, SCRIPTS / "gan_loop.py"]
    gradlift("run", *words, cwd=tmp_path)
    run = read_journal(recorded(tmp_path))
    names = {name for sample in run.samples for name in sample.parameters}
    assert {"0.weight", "2.bias", "0.weight [2]", "2.bias [2]"} <= names
    blamed = {name for step in run.steps for name in step.culprits}
    assert blamed <= names


def test_the_script_has_its_own_command_line_and_its_own_name(tmp_path):
    (tmp_path / "beside.py").write_text("here = 1\n")
    script = tmp_path / "my script.py"
    script.write_text(
        SMALL
        + "import beside, os\nstep()\n"
        + "print(sys.argv, __name__, __file__, sys.path[0], sys.modules['__main__'].step is step)\n"
    )
    words = ["--name", "mine", "-q", script, "--rule", "x", "-q", "--", "-m", "y"]
    done = gradlift("run", *words, cwd=tmp_path)
    expected = f"{[str(w) for w in words[3:]]} __main__ {script} {tmp_path} True\n"
    assert done.out == expected, done.err
    facts = json.loads((recorded(tmp_path) / "command.json").read_text())
    assert facts["command"] == [str(w) for w in words[3:]]
    assert recorded(tmp_path).name == "mine"

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        SMALL + "step()\nprint(__name__, __package__, sys.argv[1:])\n"
    )
    done = gradlift("run", "-q", "-m", "package.train", "--every", "3", cwd=tmp_path)
    assert done.out == "__main__ package ['--every', '3']\n", done.err
    names = [f.name for f in (tmp_path / "gradlift-runs").iterdir()]
    assert any(n.startswith("train-") for n in names)


def test_exit_status_and_traceback_are_the_scripts_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SMALL + "step()\ndef fail():\n    raise ValueError('broken data')\nfail()\n")
    plain = gradlift(script, cwd=tmp_path, by=PYTHON)
    done = gradlift("run", "-q", script, cwd=tmp_path)
    assert done.returncode == 1
    assert done.err == plain.err
    assert (recorded(tmp_path) / "report.html").exists()

    for status in ("sys.exit(7)", "sys.exit('out of data')", "raise SystemExit(None)"):
        script.write_text(SMALL + f"step()\n{status}\n")
        plain = gradlift(script, cwd=tmp_path, by=PYTHON)
        done = gradlift("run", "-q", script, cwd=tmp_path)
        assert (done.returncode, done.err) == (plain.returncode, plain.err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_a_readable_run_and_a_report(number, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SMALL + "import time\nwhile True:\n    step()\n    time.sleep(0.01)\n")
    process = start("run", "-q", script, cwd=tmp_path)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        journals = list(tmp_path.glob("gradlift-runs/*/journal.jsonl"))
        if journals and journals[0].read_text().count('{"kind":"step"') > 4:
            break
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    folder = recorded(tmp_path)
    assert len(read_journal(folder).steps) > 3
    assert (folder / "report.html").stat().st_size > 1000


def test_a_process_that_waits_in_c_can_be_ended(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        SMALL
        + "step()\nimport ctypes\nprint('waiting', flush=True)\nwhile True:\n"
        + "    ctypes.CDLL(None).usleep(2_000_000_000)\n"
    )
    process = start("run", "-q", script, cwd=tmp_path)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert len(read_journal(recorded(tmp_path)).steps) == 1


def test_bad_input_is_one_line_and_status_2(tmp_path):
    (tmp_path / "plain.py").write_text("print('no torch here')\n")
    cases = {
        "there is no script nowhere.py": ["run", "nowhere.py"],
        "never imported torch": ["run", "plain.py"],
        "no script": ["run"],
        "no rule is called": ["run", "--rule", "nonsense", "plain.py"],
        "no plain folder name": ["run", "--name", "../x", "plain.py"],
        "there is no module nope": ["run", "-m", "nope"],
        "cannot make": ["run", "--runs-dir", "plain.py/x", "plain.py"],
        "warp": ["selftest", "--device", "warp"],
    }
    for message, words in cases.items():
        done = gradlift(*words, cwd=tmp_path)
        assert done.returncode == 2, (words, done.err)
        assert message in done.err
        assert "Traceback" not in done.err
        assert len(done.err.strip().splitlines()) == 1


OWN = SMALL.replace("torch.amp.GradScaler", "gradlift.torch.GradScaler").replace(
    "import sys, torch", "import sys, torch, gradlift.torch"
)


@pytest.mark.parametrize("script", [SMALL, OWN], ids=["torch", "gradlift"])
def test_another_rule_takes_the_scripts_place(script, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(script + "for _ in range(4):\n    step()\nprint(scaler.get_scale())\n")
    plain = gradlift("run", "-q", "--no-report", path, cwd=tmp_path)
    assert float(plain.out) == 2.0**10
    run = read_journal(recorded(tmp_path))
    assert "exchanged" not in run.header
    done = gradlift("run", "-q", "--no-report", "--rule", "static:2^6", path, cwd=tmp_path)
    assert float(done.out) == 64.0, done.err
    other = max((tmp_path / "gradlift-runs").iterdir(), key=lambda f: f.stat().st_mtime_ns)
    header = read_journal(other).header
    assert (header["exchanged"], header["rule"]) == ("static:2^6", "static:64")
    assert len(read_journal(other).steps) == 4


# A trainer's own scaler, over the parts of torch's; the second has its steps inside a closure.
SUBCLASSES = """
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
class Parts(torch.GradScaler):
    def _unscale_grads_(self, optimizer, *args):
        return super()._unscale_grads_(optimizer, *args)
    def _maybe_opt_step(self, optimizer, state, *args, **kwargs):
        found = sum(v.item() for v in state["found_inf_per_device"].values())
        return None if found else optimizer.step(*args, **kwargs)
class Closing(torch.amp.GradScaler):
    def step(self, optimizer, closure):
        def scaled():
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = OptState.READY
            loss = closure()
            self.unscale_(optimizer)
            found = sum(v.item() for v in state["found_inf_per_device"].values())
            return None if found else loss
        return optimizer.step(scaled)
class Stepping(torch.optim.SGD):
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        return None if loss is None else super().step()
SGD = torch.optim.SGD
for kind, by in ((Parts, SGD), (Closing, Stepping), (torch.GradScaler, SGD)):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = by(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=2.0**6, growth_interval=3)
    for i in range(6):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 4)).square().mean()
            scaler.scale(loss).backward()
            if i == 3:
                model.weight.grad[0, 0] = float("inf")
            return loss
        if kind is Closing:
            scaler.step(optimizer, closure)
        else:
            closure()
            scaler.step(optimizer)
        scaler.update()
    print(kind.__name__, scaler.get_scale(), model.weight.tolist())
"""


@pytest.mark.parametrize("rule", [None, "dynamic:init_scale=2^6,growth_interval=3"])
def test_scripts_that_subclass_torchs_scaler(rule, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SUBCLASSES)
    plain = gradlift(path, cwd=tmp_path, by=PYTHON)
    assert plain.returncode == 0, plain.err
    by_rule = ["--rule", rule] if rule else []
    done = gradlift("run", "-q", "--no-report", *by_rule, path, cwd=tmp_path)
    assert done.returncode == 0, done.err
    assert done.out == plain.out
    run = read_journal(recorded(tmp_path))
    steps = [s for s in run.steps if s.key == ""]
    assert [s.scale for s in steps] == [64.0, 64.0, 64.0, 128.0, 64.0, 64.0]
    assert [s.step for s in steps if s.verdict is Verdict.SKIP] == [3]
    assert list(steps[3].culprits) == ["weight"]
    assert [call.name for call in run.calls[0].order].count("scaler.step") == 1
    assert run.calls[0].order[-1].name == "update"


@pytest.mark.parametrize("kind", ["torch", "gradlift", "gradlift, device path", "bare"])
def test_a_nan_in_the_forward_pass_is_traced_to_its_module(kind, tmp_path):
    script = tmp_path / "train.py"
    begin = OWN if kind.startswith("gradlift") else SMALL
    if kind == "gradlift, device path":
        begin += "scaler._force_device_path = True\n"
    if kind == "bare":
        begin = begin.replace('"cpu", init_scale=2.0**10', '"cpu", enabled=False')
    script.write_text(
        begin
        + """
class Log(torch.nn.Module):
    def forward(self, x):
        return x + ((x.double() * 0 + 1e5).to(x.dtype) * 0 if bad else 0)  # overflows float16 alone
criterion = torch.nn.MSELoss()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.dropout, self.log = model, torch.nn.Dropout(0.5), Log()
    def forward(self, *, x):
        return self.log(self.dropout(self.body(x)))
net = Net()
for i in range(6):
    bad = i == 3
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        out = net(x=torch.randn(4, 4))
    loss = criterion(out.float(), torch.zeros(4, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(torch.rand(1).item(), float(model[0].weight.sum()))
"""
    )
    plain = gradlift(script, cwd=tmp_path, by=PYTHON)
    done = gradlift("run", "-q", script, cwd=tmp_path)
    assert done.returncode == 0, done.err
    assert done.out == plain.out  # random numbers were put back
    run = read_journal(recorded(tmp_path))
    bad = [(s.step, s.verdict) for s in run.steps if s.cause is Cause.LOSS_NONFINITE]
    assert bad[0] == (3, Verdict.APPLY if kind == "bare" else Verdict.SKIP)
    assert "rule" in run.header
    [origin] = [e for e in run.events if e.what == "origin"]
    found = {name: origin.detail[name] for name in ("module", "op", "found", "where")}
    assert (origin.step, found) == (
        3,
        {"module": "log", "op": "_to_copy", "found": "inf", "where": "forward"},
    )


def test_what_a_script_can_see_of_how_it_is_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib.util\nimportlib.util.find_spec('torch')\n"  # asked for, not imported
        + SMALL
        + """
import atexit, dataclasses, os, signal, threading, time, multiprocessing
@dataclasses.dataclass
class Settings:
    lr: float = 1.0
print(dataclasses.fields(Settings)[0].type, __builtins__.__name__)
os.chdir("/")
print(os.path.exists(__file__))
sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, flush=True)
atexit.register(lambda: print("at exit", flush=True))
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join()
print("child", child.exitcode)
signal.signal(signal.SIGTERM, lambda *_: print("own handler", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
half = torch.nn.Linear(2, 1).half()
o = torch.optim.Adam(half.parameters(), fused=True)
other = torch.amp.GradScaler("cpu")
other.scale(half(torch.ones(1, 2).half()).float().sum()).backward()
other.step(o)
other.update()
def late():
    time.sleep(0.5)
    step()
    print("late step", flush=True)
threading.Thread(target=late).start()
"""
    )
    for end in ("", "raise ValueError('x')\n"):
        script.write_text(script.read_text() + end)
        plain = gradlift("train.py", cwd=tmp_path, by=PYTHON)
        done = gradlift("run", "-q", "--no-report", "train.py", cwd=tmp_path)
        assert (done.out, done.returncode) == (plain.out, plain.returncode), done.err
    assert "child -15" in plain.out
    journals = sorted(tmp_path.glob("gradlift-runs/*/journal.jsonl"))
    assert len(read_journal(journals[0]).steps) == 2


def test_ctrl_c_ends_as_python_ends(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        SMALL
        + "import atexit\natexit.register(lambda: print('at exit', flush=True))\nstep()\n"
        + "kept = open('kept.txt', 'w')\nkept.write('data')\nraise KeyboardInterrupt\n"
    )
    done = gradlift("run", "-q", script, cwd=tmp_path)
    assert done.returncode == -signal.SIGINT
    assert done.out == "at exit\n"
    assert (tmp_path / "kept.txt").read_text() == "data"


def test_unusual_parameters_and_optimizers_of_their_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "kinds = torch.complex64, torch.float32\n"
        "ps = [torch.nn.Parameter(torch.ones(2, dtype=d)) for d in kinds]\n"
        "os = [torch.optim.SGD([p], lr=0.1) for p in (*ps, torch.nn.Parameter(torch.ones(1)))]\n"
        "for _ in range(3):\n"
        "    for o in os:\n"
        "        p = o.param_groups[0]['params'][0]\n"
        "        p.grad = torch.ones_like(p)\n"
        "        o.step()\n"
        "print([p.tolist() for p in ps])\n"
    )
    plain = gradlift(script, cwd=tmp_path, by=PYTHON)
    done = gradlift("run", "-q", "--every", 1, script, cwd=tmp_path)
    assert (done.out, done.returncode) == (plain.out, 0), done.err
    run = read_journal(recorded(tmp_path))
    assert [s.key for s in run.steps[-3:]] == ["", "optimizer 2", "optimizer 3"]


def test_gradients_are_recorded_as_they_were_before_clipping(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.nn.utils import clip_grad_norm_\n"
        "w = torch.nn.Parameter(torch.zeros(4))\n"
        "o = torch.optim.SGD([w], lr=1.0)\n"
        "for _ in range(2):\n"
        "    o.zero_grad()\n"
        "    (w * 512.0).sum().backward()\n"
        "    clip_grad_norm_([w], 1.0)\n"
        "    o.step()\n"
        "print(w.tolist())\n"
    )
    plain = gradlift(script, cwd=tmp_path, by=PYTHON)
    done = gradlift("run", "-q", "--every", 1, script, cwd=tmp_path)
    assert done.out == plain.out
    run = read_journal(recorded(tmp_path))
    assert [s.norm for s in run.steps] == pytest.approx([1024.0] * 2, rel=1e-5)
    assert [s.amax for s in run.steps] == pytest.approx([512.0] * 2, rel=1e-5)


def test_several_scalers_and_a_pickled_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        SMALL
        + """
import copy, pickle
from torch.cpu.amp import GradScaler
other = GradScaler(init_scale=4.0)
step()
scaler = other
step()
copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sharded = ShardedGradScaler("cpu", 32.0, 0.25, 4.0)
assert sharded.get_backoff_factor() == 0.25 and sharded.get_growth_factor() == 4.0
scaler = sharded
step()
scaler = other
assert isinstance(scaler, torch.amp.GradScaler)
print(type(scaler).__name__, scaler.get_scale())
"""
    )
    done = gradlift("run", "-q", script, cwd=tmp_path)
    assert done.out == "GradScaler 4.0\n", done.err
    run = read_journal(recorded(tmp_path))
    assert [(s.key, s.scale) for s in run.steps] == [
        ("", 1024.0),
        ("scaler 2", 4.0),
        ("scaler 3", 32.0),
    ]


def test_under_torchrun_rank_0_records_and_all_agree(tmp_path):
    done = torchrun(
        *("--standalone", "--nproc-per-node=2", "-m", "gradlift", "run", "--every", 10),
        *(SCRIPTS / "gpt_loop.py", "--max-iters", 12),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.err
    folder = recorded(tmp_path)
    assert (folder / "report.html").exists()
    runs = [read_journal(folder / name) for name in ("journal.jsonl", "rank-1.jsonl")]
    assert runs[0].header["world_size"] == 2
    assert len(runs[0].steps) == 12
    told = [[(s.scale, s.verdict, s.cause) for s in run.steps] for run in runs]
    assert told[0] == told[1]
    assert len({scale for scale, _, _ in told[0]}) > 1
    assert [s.step for s in runs[0].samples] == [0, 2, 4, 6, 8, 10]  # more often in the first ten
    assert runs[1].samples == []
    assert not list((tmp_path / "gradlift-runs").glob(".launch*"))


def test_ranks_on_two_nodes_follow_the_same_rule(tmp_path):
    """The second node cannot know where the first records; it must not train by torch's rule."""
    script = tmp_path / "train.py"
    script.write_text(
        SMALL
        + "import os, torch.distributed as dist\ndist.init_process_group('gloo')\nstep(), step()\n"
        + "open(os.environ['RANK'], 'w').write(str(scaler.get_scale()))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        start(
            *("--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"),
            *("--master-addr=127.0.0.1", f"--master-port={port}"),
            *("-m", "gradlift", "run", "-q", "--rule=static:4", script),
            cwd=tmp_path,
            by=TORCHRUN,
        )
        for node in range(2)
    ]
    for node in nodes:
        _, err = node.communicate(timeout=120)
        assert node.returncode == 0, err
    assert {(tmp_path / r).read_text() for r in "01"} == {"4.0"}
    assert len(read_journal(recorded(tmp_path)).steps) == 2


def test_a_step_whose_clipping_saw_a_norm_of_inf(tmp_path):
    script = tmp_path / "train.py"
    clipped = """
for factor in (1.0, 1e36, 1.0):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 4)).mean() * factor
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    print(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    scaler.step(optimizer)
    scaler.update()
"""
    script.write_text(SMALL + clipped)
    done = gradlift("run", "-q", "--no-report", "--every", 1, script, cwd=tmp_path)
    assert "tensor(inf)" in done.out, done.out
    run = read_journal(recorded(tmp_path))
    assert [s.verdict for s in run.steps] == [Verdict.APPLY, Verdict.SKIP, Verdict.APPLY]
    assert not [e for e in run.events if e.what == "note"]


@pytest.mark.parametrize("options", [[], ["--rule=dynamic"]], ids=["", "rule"])
@pytest.mark.parametrize(
    "first",
    [
        "from gradlift.torch import GradScaler",
        "import gradlift.integrations.accelerate",
        "import gradlift.integrations.lightning",
        "from gradlift.apex import amp",
        "import accelerate",
    ],
)
def test_whatever_a_script_imports_first(tmp_path, first, options):
    """Import sorters put gradlift in front of torch."""
    script = tmp_path / "train.py"
    script.write_text(f"{first}\n{SMALL}step()\n")
    done = gradlift("run", "-q", "--no-report", *options, script, cwd=tmp_path)
    assert done.returncode == 0, done.err
    assert len(read_journal(recorded(tmp_path)).steps) == 1


@pytest.mark.parametrize("kind", ["torch.amp", "gradlift.torch"])
def test_the_recorded_loss_is_the_one_before_it_was_scaled(tmp_path, kind):
    script = tmp_path / "train.py"
    own = SMALL.replace("torch.amp.GradScaler", "GradScaler")
    script.write_text(
        f"from {kind} import GradScaler\n"
        + own.replace("scaler.step", "print(float(loss)); scaler.step")
        + "for factor in (1.0, 3.0, 0.5):\n    step(factor)\n"
    )
    done = gradlift("run", "-q", "--no-report", script, cwd=tmp_path)
    assert done.returncode == 0, done.err
    run = read_journal(recorded(tmp_path))
    assert [s.loss for s in run.steps] == [float(line) for line in done.out.split()]
    assert [s.scale for s in run.steps] == [2.0**10] * 3


def test_a_script_that_probes_is_recorded_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        OWN
        + "from gradlift.torch import layerwise, probe\nprobe(model, every=1)\nlayerwise(model)\n"
        + "with torch.autocast('cpu', torch.float16):\n    out = model(torch.ones(2, 4))\n"
        + "loss = out.float().mean()\n"
        + "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n"
    )
    done = gradlift("run", "-q", "--no-report", script, cwd=tmp_path)
    assert done.returncode == 0, done.err
    (seen,) = read_journal(recorded(tmp_path)).probes
    assert {"0", "2"} <= set(seen.modules)


@pytest.mark.parametrize("options", [[], ["--no-source"]])
def test_lines_of_the_script_are_recorded(tmp_path, options):
    text = [*SMALL.splitlines(), "for _ in range(3):", "    step()", "raise KeyError('end')"]
    (tmp_path / "script.py").write_text("\n".join(text))
    gradlift("run", "-q", "--no-report", *options, "script.py", cwd=tmp_path)
    run = read_journal(recorded(tmp_path))
    source = source_of(run)
    if options:
        assert source == {}
        return
    assert list(source) == ["script.py"]
    assert all(text[n - 1] == line for n, line in source["script.py"].items())
    places = {call.place for calls in run.calls for call in calls.order if call.place}
    assert len(places) > 3
    assert all(line_at(source, place) is not None for place in places)
    assert source["script.py"][len(text)] == "raise KeyError('end')"
