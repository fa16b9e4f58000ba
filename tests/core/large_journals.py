"""Journals of 10 MB, each the worst of its kind; `python tests/core/large_journals.py` measures
what every command costs on each of them."""

import gzip
import json
import os
import random
import string
import sys
import tempfile
import time

SIZE = 10 * 10**6
HEAD = '{"kind":"header","schema":1}\n'
LETTERS = string.ascii_letters + string.digits
ONE = '{"elements":1}'


def short(i):
    """The i-th name, as short as can be."""
    name, i = "", i + 1
    while i:
        i, digit = divmod(i, len(LETTERS))
        name += LETTERS[digit]
    return name


def step(i, **more):
    line = {"kind": "step", "step": i, "scale": 8.0, "next_scale": 8.0, **more}
    return json.dumps(line, separators=(",", ":")) + "\n"


def skip(i, **more):
    return step(i, verdict="skip", cause="OVERFLOW", nonfinite=True, **more)


def event(i, what, **more):
    return json.dumps({"kind": "event", "step": i, "what": what, **more}) + "\n"


def sample(i, parameters):
    return f'{{"kind":"sample","step":{i},"parameters":{{{parameters}}}}}\n'


def probe(i, modules):
    return f'{{"kind":"probe","step":{i},"modules":{{{modules}}}}}\n'


def named(i, n, value):
    """n names of their own in line i."""
    return ",".join(f'"{short(i * n + j)}":{value}' for j in range(n))


def header(rest):
    return f'{{"kind":"header","schema":1,{rest}}}\n'


def repeated(text, between=",", around=("[", "]")):
    return around[0] + between.join([text] * (SIZE // (len(text) + len(between)))) + around[1]


ALL = ",".join(f'"{e}":1' for e in range(-1100, 1101))

# A line for each i, as many as there is room for.
LINES = {
    "tiny_steps": lambda i: '{"kind":"step","step":0,"scale":1,"next_scale":1}\n',
    "steps_skipped": lambda i: skip(i, culprits=[short(i)]),
    "steps_full": lambda i: step(
        i, amax=2.0 ** (i % 16), loss=1.0 + i, norm=1.0, lr=0.1, seconds=1
    ),
    "steps_keys": lambda i: skip(i, key=short(i % 1000), amax=1.0 * i),
    "steps_alternating": lambda i: (skip if i % 2 else step)(i, amax=2.0 ** (i % 16)),
    "steps_wild": lambda i: step(i).replace("8.0", f"1e{i % 700 - 350}"),
    "culprits_many_lines": lambda i: skip(i, culprits=[short(i * 1000 + j) for j in range(1000)]),
    "tiny_events": lambda i: event(0, short(i)),
    "events_retry": lambda i: event(i, "retry", culprits=[short(i)], cause=short(i)),
    "events_culprits": lambda i: event(
        i, "retry", culprits=[short(i * 1000 + j) for j in range(1000)]
    ),
    "events_note": lambda i: event(i, "note", code=short(i), text=short(i)),
    "events_escapes": lambda i: event(i, "note", text="\ud800" * 1000),
    "events_digits": lambda i: event(i, "x", y=0).replace(" 0}", " " + "9" * 4200 + "}"),
    "tiny_samples": lambda i: sample(0, ""),
    "samples_one": lambda i: sample(i, '"w":{"elements":4,"exponents":{"1":4}}') + step(i),
    "samples_names": lambda i: sample(0, named(i, 1000, "{}")),
    "samples_200_000_names": lambda i: sample(0, named(i, 199_000, "{}")),
    "samples_100_000_each": lambda i: sample(i, named(0, 100_000, ONE)) + step(i),
    "sample_exponents": lambda i: (
        sample(i, f'"{short(i)}":{{"elements":2201,"exponents":{{{ALL}}}}}') + step(i)
    ),
    "samples_far_apart": lambda i: sample(
        0, named(i, 1000, '{"elements":2,"exponents":{"-1100":1,"1100":1}}')
    ),
    "samples_huge_exponents": lambda i: sample(i, '"w":{"exponents":{"1000000000":4}}'),
    "samples_huge_counts": lambda i: sample(
        i, f'"w":{{"elements":{2**63 - 1},"zero":1,"exponents":{{"3":{2**63 - 1}}}}}'
    ),
    "samples_extras": lambda i: sample(0, f'"w":{{{named(0, 1000, "[]")}}}'),
    "probe_names": lambda i: probe(0, named(i, 1000, "{}")),
    "probe_tiny": lambda i: probe(0, '"a":{"amax":1}'),
    "headers": lambda i: HEAD,
    "headers_parameters": lambda i: header(f'"parameters":{{{named(i, 1000, "1")}}}'),
    "deep_many": lambda i: "[" * 900 + "]" * 900 + "\n",
    "float_digits": lambda i: event(0, "x", y=0).replace(" 0}", " 0." + "9" * 10**6 + "}"),
    "lines_of_one": lambda i: "1\n",
    "lines_empty": lambda i: "\n",
    "lines_nul": lambda i: "\0\n",
    "lines_that_make_a_list": lambda i: ("[1\n", "1]\n", "1,1\n")[i % 3],
}
# The whole journal.
WHOLE = {
    "culprits_one_line": lambda: (
        HEAD
        + skip(0, culprits=["@"]).replace(
            '["@"]', f"[{','.join(map(json.dumps, map(short, range(1_300_000))))}]"
        )
    ),
    "header_lists": lambda: header(f'"x":{repeated("[]")}') + step(0),
    "header_dicts": lambda: header(f'"x":{repeated("{}")}') + step(0),
    "header_names": lambda: header(named(0, 1_000_000, "1")) + step(0),
    "header_versions": lambda: header(f'"versions":{{{named(0, 1_000_000, "1")}}}') + step(0),
    "header_escapes": lambda: header(f'"command":{repeated(json.dumps(chr(27)))}') + step(0),
    "one_line": lambda: HEAD + "x" * SIZE,
    "one_text": lambda: HEAD + event(0, "note", text="x" * SIZE),
    "deep": lambda: HEAD + "[" * (SIZE // 2) + "]" * (SIZE // 2) + "\n" + step(0),
    "deep_open": lambda: HEAD + "[" * SIZE,
    "deep_dicts": lambda: HEAD + '{"a":' * (SIZE // 6) + "1" + "}" * (SIZE // 6) + "\n" + step(0),
    "digits": lambda: HEAD + '{"kind":"step","step":' + "9" * SIZE + "}\n",
    "the_same_key": lambda: HEAD + repeated('"step":1', around=("{", "}")) + "\n" + step(0),
    "colliding_keys": lambda: (
        HEAD + "{" + ",".join(f'"{i * (2**61 - 1)}":1' for i in range(450_000)) + "}\n" + step(0)
    ),
    "schema": lambda: '{"kind":"header","schema":' + "1" * SIZE,
    "binary": lambda: random.Random(0).randbytes(SIZE),
    "binary_inside": lambda: HEAD.encode() + random.Random(0).randbytes(SIZE),
    "compressed": lambda: gzip.compress(HEAD.encode() + random.Random(0).randbytes(SIZE)),
    "utf16": lambda: (HEAD + step(0) * 90_000).encode("utf-16"),
    "utf16_inside": lambda: HEAD.encode() + (step(0) * 90_000).encode("utf-16"),
}


def made(name):
    if name in WHOLE:
        whole = WHOLE[name]()
        return whole if isinstance(whole, bytes) else whole.encode()
    parts, size, i = [HEAD], len(HEAD), 0
    while size < SIZE:
        parts.append(LINES[name](i))
        size += len(parts[-1])
        i += 1
    return "".join(parts).encode()


COMMANDS = (
    ("doctor",),
    ("report",),
    ("report", "--text"),
    ("report", "--json"),
    ("replay", "--rule", "auto"),
    ("find-scale",),
    ("compare",),
    ("watch", "--once"),
)


def measured(words, log):
    """(status, seconds of the processor, MiB) of a command in a process of its own."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.execv(sys.executable, [sys.executable, "-m", "gradlift", *words])
    _, status, used = os.wait4(child, 0)
    seconds = used.ru_utime + used.ru_stime
    return os.waitstatus_to_exitcode(status), seconds, used.ru_maxrss / 1024


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    path, log = os.path.join(folder, "run.jsonl"), os.path.join(folder, "errors")
    slowest = largest = ("", 0.0)
    start, bad, tried = time.time(), 0, 0
    for name in sys.argv[1:] or [*LINES, *WHOLE]:
        with open(path, "wb") as file:
            file.write(made(name))
        for words in COMMANDS:
            given = [path, path] if words == ("compare",) else [path]
            status, seconds, size = measured([*words, *given], log)
            with open(log, errors="replace") as file:
                failed = status not in (0, 1, 2) or "Traceback" in file.read()
            bad, tried = bad + failed, tried + 1
            what = f"{name} {' '.join(words)}"
            print(
                f"{what:44} {status} {seconds:6.1f} s {size:6.0f} MiB{' BAD' * failed}", flush=True
            )
            slowest, largest = (
                max(slowest, (what, seconds), key=lambda x: x[1]),
                max(largest, (what, size), key=lambda x: x[1]),
            )
    print(f"{tried} commands in {time.time() - start:.0f} s, {bad} bad; {slowest}, {largest}")
