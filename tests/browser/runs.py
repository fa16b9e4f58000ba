"""Runs to look at."""

from gradlift import Cause, Verdict
from gradlift.journal import Event, Run, Sample, Step

OVERFLOWS = (5, 6, 40)
PHONE = {"width": 390, "height": 844}
SHARES = {"zero": 0.0, "subnormal": 0.0, "near_max": 0.0}


def training():
    """Sixty steps, three overflows, three sampled parameters."""
    steps = []
    for i in range(60):
        step = Step(i, 2.0**16, 2.0**16, 2.0**10 + i, False, 4 - i / 30, 0.5 + i / 60, seconds=0.1)
        if i in OVERFLOWS:
            bad = {"verdict": Verdict.SKIP, "cause": Cause.OVERFLOW, "nonfinite": True}
            step = step._replace(**bad, culprits=(f"layer{i}.weight",))
        steps.append(step)
    sample = {
        "a.weight": {**SHARES, "elements": 10, "exponents": {"-3": 10}},
        "b.weight": {**SHARES, "elements": 10, "zero": 0.3, "exponents": {"-30": 2, "1": 5}},
        "c.bias": {**SHARES, "elements": 10, "zero": 0.1, "exponents": {"-20": 9}},
    }
    return Run(
        header={"rule": "backoff", "parameters": {"a.weight": 10, "b.weight": 10, "c.bias": 10}},
        steps=steps,
        samples=[Sample(i, sample) for i in range(0, 60, 10)],
        events=[Event(50, "note", {"text": "evaluation"})],
    )
