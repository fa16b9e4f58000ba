"""Journals in which one value is replaced by something that does not belong there, or bytes are
changed."""

import gzip
import json

from gradlift import Cause, Journal, Verdict
from gradlift.journal import Call, Calls, Step

DEEP = 100_000


class Raw(str):
    """JSON that `json.dumps` does not write: a huge number, a deep nesting, a lone surrogate."""


VALUES = {
    "null": None,
    "true": True,
    "negative": -1,
    "zero": 0,
    "zero float": 0.0,
    "smallest float": 5e-324,
    "fraction": 0.5,
    "text": "text",
    "empty text": "",
    "nul": "a\x00b",
    "C1": "\x9b31mred\x9d0;title\x9c",
    "lines": "a\nb\rc\u2028d",
    "markup": "[bold]x[/nowhere] <b>&amp;</script> :smile: | ** `",
    "list": [1, "a", None],
    "dictionary": {"a": [1]},
    "largest float": 1.7e308,
    "2^63": 2**63,
    "10^400": 10**400,
    "6000 digits": Raw("9" * 6000),
    "1e999": Raw("1e999"),
    "NaN": Raw("NaN"),
    "Infinity": Raw("-Infinity"),
    "nesting": Raw("[" * DEEP + "]" * DEEP),
    "surrogate": Raw('"\\ud800"'),
    "escape": "\x1b[31mred\x1b]0;title\x07",
    "right to left": "\u202eabc",
    "long text": "x" * 1_000_000,
}
OUTPUTS = {"type": "Linear", "dtype": "float16", "amax": 40000.0, "zero": 0.5, "nonfinite": 0}
WEIGHTS = {"dtype": "float32", "rms": 0.5, "amax": 2.0, "update": 1e-3, "unchanged": 0.25}
WEIGHTS |= {"nonfinite": 0, "below_eps": 0.5, "alike": 0, "gradient": "some"}
ORDER = (
    Call("backward", "train.py:11", "", "scaled"),
    Call("clip_grad_norm_", "train.py:12", "SGD", "0.25", 3),
    Call("scaler.step", "train.py:13", "SGD"),
)
ORIGIN = {"found": "nan", "where": "forward", "module": "head", "op": "log", "input": "0.0"}
ORIGIN |= {"place": "train.py:12", "dtype": "float16"}
KEYS = ("1000000000", "-1000000000", "abc", "1e5", "9" * 400, "\x1b[2J", "")


def write(path):
    """A sound journal with every kind of line."""
    statistics = {
        "elements": 8,
        "zero": 0.25,
        "exponents": {"-3": 4, "2": 2},
        "amax": 2.0,
        "near_max": 0.125,
        "subnormal": 0.0,
    }
    with Journal(path) as journal:
        journal.describe(rule="dynamic", framework="torch", formats=["fp16"], world_size=1)
        journal.describe(parameters={"body.weight": 8, "head.weight": 8}, command=["train.py"])
        for i in range(12):
            bad = i % 5 == 3
            step = Step(i, 1024.0, 512.0 if bad else 1024.0, 2.0, norm=0.5, loss=1.0, lr=0.1)
            step = step._replace(seconds=0.1, probe_amax=4.0, retries=int(bad))
            if bad:
                step = step._replace(verdict=Verdict.SKIP, cause=Cause.OVERFLOW, nonfinite=True)
                step = step._replace(culprits=("head.weight",))
                detail = {"cause": "OVERFLOW", "scale": 1024.0, "next_scale": 512.0}
                detail |= {"culprits": ["head.weight (inf)"], "micro_batch": 0, "key": ""}
                journal.event("retry", i, **detail)
                journal.event("skip", i, **detail)
            journal.step(step)
            if i % 3 == 0:
                journal.sample(i, {"body.weight": statistics, "head.weight": statistics})
                journal.probe(i, {"body": {**statistics, "lift": 4.0}})
                journal.forward(i, {"body": OUTPUTS, "head": OUTPUTS})
                journal.weights(i, {"body.weight": WEIGHTS, "head.weight": WEIGHTS})
        journal.event("note", 11, code="half-loss", text="the loss was float16")
        journal.event("trace", 11, module="head", found="nan", where="forward")
        journal.event("halt", 11, **detail)
        journal.calls(Calls(0, ORDER, 12))
        journal.event("source", file="train.py", lines={"12": "scaler.step(optimizer)"})
        journal.event("optimizer", 0, who="SGD", groups=[{"lr": 0.1, "eps": 1e-8, "dtypes": ["x"]}])
        journal.event("trained", 0, left_out=["head.bias"], left_out_count=1, shared=[], trained=2)
        journal.event("origin", 3, **ORIGIN)
        journal.event("end", how="exception", type="KeyError", message="'a'", place="train.py:12")
    with Journal(path) as journal:
        journal.step(Step(12, 512.0, 512.0, 2.0, key="other"))


def places(value, path=()):
    """The path of every value inside a JSON value, and of every key."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def replaced(line, path, new):
    """The line with another value at `path`, as text."""
    mark = "@HERE@"
    value = json.loads(line)
    if not path:
        value = mark
    else:
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = mark
    raw = new if isinstance(new, Raw) else json.dumps(new)
    return json.dumps(value, separators=(",", ":")).replace(f'"{mark}"', raw)


def renamed(line, path, key):
    """The line with another key instead of the last one of `path`."""
    value = json.loads(line)
    inner = value
    for each in path[:-1]:
        inner = inner[each]
    kept = {key if k == path[-1] else k: v for k, v in inner.items()}
    inner.clear()
    inner.update(kept)
    return json.dumps(value, separators=(",", ":"))


def cases(lines):
    """(name, whole journal) for every place of one line of each shape, and every value."""
    shapes = {}
    for at, line in enumerate(lines):
        value = json.loads(line)
        shapes.setdefault((value["kind"], value.get("what"), *sorted(value)), at)
    for shape, at in shapes.items():
        for path in places(json.loads(lines[at])):
            where = f"{shape[0]} {shape[1] or ''} {'.'.join(map(str, path))}"
            changed = [(name, replaced(lines[at], path, new)) for name, new in VALUES.items()]
            if path and isinstance(path[-1], str):
                changed += [(f"key {key[:9]!r}", renamed(lines[at], path, key)) for key in KEYS]
            for name, line in changed:
                yield f"{where}: {name}", "\n".join([*lines[:at], line, *lines[at + 1 :]]) + "\n"


def mutated(journal, random):
    """(name, bytes): the journal with a few bytes, lines or fields changed at random."""
    data, lines = journal.encode(), journal.splitlines()
    at, other = random.randrange(len(data)), random.randrange(len(data))
    i, j = random.randrange(len(lines)), random.randrange(len(lines))

    def flipped():
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 8, 64))):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return bytes(changed)

    def swapped_values():
        first, second = json.loads(lines[i]), json.loads(lines[j])
        a, b = random.choice(list(first)), random.choice(list(second))
        first[a], second[b] = second[b], first[a]
        made = [*lines]
        made[i], made[j] = json.dumps(first), json.dumps(second)
        return "\n".join(made).encode()

    def renamed_field():
        value = json.loads(lines[i])
        name = random.choice(list(value))
        value[random.choice(["kind", "step", "scale", "culprits", "parameters"])] = value.pop(name)
        return "\n".join([*lines[:i], json.dumps(value), *lines[i + 1 :]]).encode()

    def with_lines(changed):
        return "\n".join(changed).encode() + b"\n"

    ways = {
        "flipped": flipped,
        "cut off": lambda: data[:at],
        "beginning cut off": lambda: data[at:],
        "a part cut out": lambda: data[: min(at, other)] + data[max(at, other) :],
        "a part twice": lambda: data[:at] + data[min(at, other) :],
        "bytes inserted": lambda: data[:at] + random.randbytes(20) + data[at:],
        "NUL inserted": lambda: data[:at] + b"\0" * random.choice((1, 4096)) + data[at:],
        "line end inserted": lambda: data[:at] + b"\n" + data[at:],
        "a line left out": lambda: with_lines([*lines[:i], *lines[i + 1 :]]),
        "a line moved": lambda: with_lines([*lines[:i], *lines[i + 1 :], lines[i]]),
        "lines in another order": lambda: with_lines([lines[0], *random.sample(lines, len(lines))]),
        "a line many times": lambda: with_lines([*lines, *[lines[i]] * 200]),
        "values swapped": swapped_values,
        "a field renamed": renamed_field,
        "no line ends": lambda: data.replace(b"\n", b" "),
        "other line ends": lambda: data.replace(b"\n", random.choice((b"\r\n", b"\r", b"\n\n"))),
        "another encoding": lambda: data.decode().encode(
            random.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"))
        ),
        "compressed": lambda: gzip.compress(data),
        "noise": lambda: data[: len(lines[0]) + 1] + random.randbytes(2000),
    }
    way = random.choice(list(ways))
    return f"{way} at {at}, {other}, {i}, {j}", ways[way]()
