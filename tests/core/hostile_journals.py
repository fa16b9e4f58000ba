"""Journals in which one value is replaced by something that does not belong there."""

import json

from gradlift import Cause, Journal, Verdict
from gradlift.journal import Step

DEEP = 100_000


class Raw(str):
    """JSON that `json.dumps` does not write: a huge number, a deep nesting, a lone surrogate."""


VALUES = {
    "null": None,
    "true": True,
    "negative": -1,
    "fraction": 0.5,
    "text": "text",
    "empty text": "",
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
        journal.event("note", 11, code="half-loss", text="the loss was float16")
        journal.event("trace", 11, module="head", found="nan", where="forward")
        journal.event("halt", 11, **detail)
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
