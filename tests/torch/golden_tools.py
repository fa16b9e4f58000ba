"""What golden stories are told with: small exact networks, a book to write down what happened.

All data are small binary fractions, and sums are taken in float64: a reading, a norm or a loss has
one value, whatever the order in which a processor adds up.
"""

import contextlib
import difflib
import enum
import gc
import hashlib
import json
import math
import os
import platform
import re
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from gradlift import read_journal
from gradlift.torch import GradScaler

GOLDEN = Path(__file__).parent / "golden"
BIG = 2.0**16  # a loss whose gradients leave float16 at every scale of these stories
LR = 2.0**-6
HOW = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
HEX = re.compile(r"-?(0x[0-9a-f.]+p[+-]\d+|inf|nan)")
TENSOR = re.compile(r"b?(float|int|uint)\d+\[[\d, ]*\]")
LEFT_OUT = ("seconds", "near_max")  # by chance, or not in the old stories


def data(shape, seed):
    """Multiples of 1/8 between -1 and 1, none of them 0."""
    g = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, shape, generator=g) * 2 - 1
    return torch.randint(1, 9, shape, generator=g) * sign / 8


class Net(nn.Module):
    """`below` is used in float16, so its gradients overflow as they really do; others are not."""

    def __init__(self, seed=0):
        super().__init__()
        self.below = nn.Parameter(data((5, 7), 1000 + seed))
        self.above = nn.Parameter(data((7,), 2000 + seed))
        self.tail = nn.Parameter(data((), 3000 + seed))

    def terms(self, seed):
        half = self.below.half() * data((5, 7), seed).half()
        return [half.float(), self.above.double() * data((7,), seed + 50), self.tail.double()]

    def forward(self, seed, factor=1.0):
        total = sum(term.double().sum() for term in self.terms(seed))
        return (total * (factor / 16)).float()


class Noisy(Net):
    """Draws random numbers, and counts its calls in a buffer: what a retry has to put back."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.register_buffer("calls", torch.zeros(()))

    def terms(self, seed):
        self.calls += 1
        half, *rest = super().terms(seed)
        return [half * (torch.rand(half.shape) > 0.5), *rest]


class Patchy(Net):
    """`late` is frozen at first, `seldom` has no gradient now and then."""

    def __init__(self, dtype, seed=0):
        super().__init__(seed)
        self.late = nn.Parameter(data((3,), 4000 + seed), requires_grad=False)
        self.seldom = nn.Parameter(data((2, 3), 5000 + seed))
        for name in ("below", "above", "late", "seldom"):  # `tail` stays in float32
            p = getattr(self, name)
            p.data = p.data.to(dtype)

    def terms(self, seed):
        more = [self.late.double() * data((3,), seed + 60)]
        if seed % 3 != 1:
            more.append(self.seldom.double() * data((2, 3), seed + 70))
        return super().terms(seed) + more


def optimizer_of(name, how, params, **settings):
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(params, lr=LR, **HOW[how], **momentum, **settings)


def backward(scaler, net, what, seed, key=None):
    """One micro-batch: a factor of the loss, or what goes wrong."""
    if what == "no gradients":
        return
    loss = net(seed, what if isinstance(what, float) else 1.0)
    if what == "nan loss":
        loss = loss * math.nan
    if what == "inf loss":  # its gradients are finite
        loss = loss + math.inf
    scaler.scale(loss, key=key).backward()
    if what in ("inf", "nan"):
        net.below.grad[-1] = float(what)
        net.tail.grad.fill_(-math.inf)


def forced(scaler, path):
    scaler._force_device_path = path == "device"
    return scaler


class Book:
    """Holds a story: lines of steps, and at the end the weights, the states and the journals."""

    def __init__(self, folder):
        self.folder = folder
        self.told = {"steps": []}
        self.scalers = []

    def scaler(self, path="host", journal=False, **settings):
        """The story's scaler; the last one made is the one that lines tell of."""
        where = self.folder / f"{len(self.scalers)}.jsonl" if journal else None
        scaler = forced(GradScaler("cpu", journal=where, **settings), path)
        self.scalers.append((scaler, where))
        return scaler

    def line(self, what, key=None, **more):
        """What came of the last step."""
        scaler, _ = self.scalers[-1]
        line = {"what": what, **shown(scaler.result), "next_scale": scaler.get_scale(key), **more}
        self.told["steps"].append(line)

    def note(self, name, value):
        self.told.setdefault("notes", {})[name] = value

    def step(self, net, optimizer, what, seed, clear=True, **how):
        """One whole step of an ordinary loop."""
        scaler, _ = self.scalers[-1]
        if clear:
            optimizer.zero_grad()
        backward(scaler, net, what, seed)
        scaler.step(optimizer, **how)
        scaler.update()
        self.line(what)

    @contextlib.contextmanager
    def caught(self, what):
        """Writes down the text of an exception, or that there was none."""
        try:
            yield
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = "nothing was raised"
        self.told.setdefault("raised", []).append([what, said])

    def close(self, nets=(), optimizers=()):
        """The end: hashes of all weights and states, and what the scalers say."""
        self.told["weights"] = [
            {name: digest(t) for name, t in net.state_dict().items()} for net in listed(nets)
        ]
        self.told["optimizers"] = [flat(state_of(o)) for o in listed(optimizers)]
        self.told["scalers"] = [ending(scaler, where) for scaler, where in self.scalers]


def listed(things):
    return list(things) if isinstance(things, (list, tuple)) else [things]


def shown(result):
    """A `StepResult`, without what is empty."""
    if result is None:
        return {"verdict": None}
    line = {
        "scale": result.scale,
        "verdict": str(result.verdict),
        "cause": result.cause.name,
        "stepped": result.stepped,
        "norm": float(result.grad_norm).hex(),
    }
    if result.culprits:
        line["culprits"] = [[str(c), getattr(c, "kind", "")] for c in result.culprits]
    if result.micro_batch is not None:
        line["micro_batch"] = result.micro_batch
    if result.notes:
        line["notes"] = list(result.notes)
    if result.retries:
        line["retries"] = result.retries
    return line


def state_of(optimizer):
    saved = optimizer.state_dict()
    own = {"own": saved["gradlift"]} if "gradlift" in saved else {}
    return {**saved["state"], **own, "lr": [group["lr"] for group in saved["param_groups"]]}


def ending(scaler, where):
    saved = scaler.state_dict()  # tells what is still due
    told = {
        "state": saved,
        "skipped_steps": scaler.skipped_steps,
        "consecutive_skips": scaler.consecutive_skips,
        "events": [[e.step, e.what, e.detail] for e in scaler.events],
    }
    if saved:  # the events are told already
        own = dict(saved["gradlift"])
        own["events"] = hashed(own["events"].encode())
        own["keys"] = json.loads(own["keys"])
        told["state"] = {**saved, "gradlift": own}
    if where is not None and where.exists():
        told["journal"] = journal_of(where)
    return told


def journal_of(where):
    run = read_journal(where)
    steps = []
    for step in run.steps:
        defaults = step._field_defaults
        line = {k: v for k, v in step._asdict().items() if k not in LEFT_OUT}
        steps.append(
            {k: v for k, v in line.items() if not (k in defaults and same(v, defaults[k]))}
        )
    told = {
        "header": {k: v for k, v in run.header.items() if k not in ("time", "versions")},
        "steps": steps,
        "events": [list(e) for e in run.events],
        "samples": [list(s) for s in run.samples],
        "probes": [list(p) for p in run.probes],
    }
    return {k: v for k, v in told.items() if v}


def same(a, b):
    return a is b or a == b or (a != a and b != b)


def hashed(content):
    return hashlib.sha256(content).hexdigest()[:16]


def digest(t):
    """Type, shape and a hash of the bytes; a single number is told in full, NaNs are all alike."""
    t = t.detach().to_dense().cpu().contiguous()
    if t.is_floating_point():
        t = t.masked_fill(t.isnan(), math.nan)
    name = str(t.dtype).removeprefix("torch.")
    if t.numel() == 1 and t.is_floating_point():
        return f"{name}{list(t.shape)} {float(t).hex()}"
    return f"{name}{list(t.shape)} {hashed(t.reshape(-1).view(torch.uint8).numpy().tobytes())}"


def flat(value, path=""):
    """Nested dicts and lists as one dict of paths."""
    if isinstance(value, torch.Tensor):
        return {path: digest(value)}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        found = {}
        for k, v in value.items():
            found.update(flat(v, f"{path}.{k}" if path else str(k)))
        return found
    return {path: value}


def plain(value):
    """JSON-able; what JSON lacks as text."""
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, enum.IntEnum):
        return value.name
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if k not in LEFT_OUT}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, str):
        return str(value)
    return value


@contextlib.contextmanager
def one_thread():
    """Alone: one thread, a fixed seed, and no module from outside is found by its parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def tell(story, *args, **kwargs):
    """Runs a story; what is written down, with the warnings that were given."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        book = Book(Path(folder))
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # of whatever was left behind before
            story(book, *args, **kwargs)
        texts = [f"{w.category.__name__}: {w.message}" for w in given]
        if texts:
            book.told["warnings"] = texts
        return json.loads(json.dumps(plain(book.told)))


def surroundings():
    """What else bits depend on."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    }


def packed(stories):
    """Stories and a pool: what occurs more than once is kept there, referred to as "@number"."""
    counts, pool, places = Counter(), [], {}

    def texts(value):
        """Of all that is long, in this order of looking."""
        if isinstance(value, (dict, list)):
            text = compact(value)
            if len(text) > 100:
                counts[text] += 1
                if counts[text] == 1:
                    for part in value.values() if isinstance(value, dict) else value:
                        texts(part)

    def short(value):
        if not isinstance(value, (dict, list)):
            assert not str(value).startswith("@")
            return value
        text = compact(value)
        if text in places:
            return places[text]
        if isinstance(value, dict):
            made = {k: short(v) for k, v in value.items()}
        else:
            made = [short(v) for v in value]
        if counts[text] < 2:
            return made
        pool.append(made)
        places[text] = f"@{len(pool) - 1}"
        return places[text]

    for told in stories.values():
        texts(told)
    return {name: short(told) for name, told in stories.items()}, pool


def unpacked(value, pool):
    if isinstance(value, str) and value.startswith("@"):
        return unpacked(pool[int(value[1:])], pool)
    if isinstance(value, dict):
        return {k: unpacked(v, pool) for k, v in value.items()}
    return [unpacked(v, pool) for v in value] if isinstance(value, list) else value


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def write(name, stories):
    short, pool = packed(stories)
    lines = [f"{json.dumps(k)}: {compact(v)}" for k, v in short.items()]
    made = f'"made with": {json.dumps(surroundings())}'
    shared = '"pool": [\n' + ",\n".join(map(compact, pool)) + "\n]"
    where = GOLDEN / name
    where.write_text("{\n" + ",\n".join([made, *lines, shared]) + "\n}\n")
    assert stored(name)[0] == stories


def stored(name):
    """The stories of a file, and what they were made with."""
    read = json.loads((GOLDEN / name).read_text())
    made, pool = read.pop("made with"), read.pop("pool")
    return {title: unpacked(told, pool) for title, told in read.items()}, made


def first_difference(old, new, path=""):
    """Where two stories part, as text: "steps[3].cause: 'OVERFLOW' != 'NONE'"; None if nowhere."""
    if isinstance(old, dict) and isinstance(new, dict):
        for k in [*old, *(k for k in new if k not in old)]:
            at = f"{path}.{k}" if path else str(k)
            if k not in new:
                return f"{at}: {old[k]!r:.300} is missing"
            if k not in old:
                return f"{at}: {new[k]!r:.300} is new"
            if found := first_difference(old[k], new[k], at):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list):
        for i, (a, b) in enumerate(zip(old, new)):
            if found := first_difference(a, b, f"{path}[{i}]"):
                return found
        if len(old) != len(new):
            more = (old if len(old) > len(new) else new)[min(len(old), len(new))]
            return (
                f"{path}: {len(old)} entries != {len(new)}, the first of the others: {more!r:.300}"
            )
        return None
    return None if alike(old, new) else f"{path}: {old!r} != {new!r}"


def alike(old, new):
    """Equal. Numbers may differ by 1e-5, and bytes of tensors are not compared: processors add up
    and round in different ways. Bits are compared with torch's own in `test_peer.py`."""
    if type(old) is not type(new):
        return False
    if isinstance(old, float):
        near = math.isclose(old, new, rel_tol=1e-5, abs_tol=1e-8)  # a loss may nearly cancel
        return near or (math.isnan(old) and math.isnan(new))
    if isinstance(old, str):
        (kind, value), (other, number) = old.rpartition(" ")[::2], new.rpartition(" ")[::2]
        if old != new and kind == other:
            if HEX.fullmatch(value) and HEX.fullmatch(number):
                a, b = float.fromhex(value), float.fromhex(number)
                return alike(a, b) or (bool(kind) and math.isclose(a, b, rel_tol=1e-3))  # LBFGS
            return bool(TENSOR.fullmatch(kind)) and len(value) == len(number)
    return old == new


def tape_difference(old, new):
    """The lines that differ, with some around them."""
    return "\n".join(difflib.unified_diff(old, new, "stored", "now", lineterm="", n=2))
