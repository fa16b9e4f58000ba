"""Draws docs/pictures/rule-*.svg: what each rule does with one and the same trace of gradients.

python docs/draw_rules.py
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from gradlift import Reading, Verdict, rules
from gradlift.core import decide

RULES = {
    "static": "static:2^10",
    "backoff": "dynamic:growth_interval=100",
    "hysteresis": "megatron:growth_interval=100,init_scale=2^16",
    "headroom": "auto",
}
STEPS = 1200


def peaks() -> list[float]:
    """log2 of the largest gradient: noise, three spikes, a fall by 6 bits, a rise by 9."""
    rng = random.Random(1)
    level = [0.0] * 500 + [-6.0] * 350 + [3.0] * (STEPS - 850)
    noise = [x + rng.gauss(0, 0.5) for x in level]
    for spike in (150, 300, 420):
        noise[spike] += 5
    return noise


def run(rule: rules.Rule, retries: int) -> tuple[list[float], list[int], list[int]]:
    """Scales used, as log2, the steps that were lost, and those that were computed again."""
    state, used, lost, again = rule.init(), [], [], []
    for step, peak in enumerate(peaks()):
        for left in range(retries, -1, -1):
            scaled = 2.0**peak * state.scale
            overflow = scaled >= 65520
            reading = Reading(overflow, math.inf if overflow else scaled)
            verdict, _ = decide(reading, state, rule, retries_left=left)
            scale, state = state.scale, rule.advance(state, reading)
            if verdict is not Verdict.RETRY:
                break
            again.append(step)
        used.append(math.log2(scale))
        if overflow:
            lost.append(step)
    return used, lost, sorted(set(again))


def draw(name: str, text: str, folder: Path) -> None:
    used, lost, again = run(rules.parse(text), 8 if text == "auto" else 0)
    figure, axes = plt.subplots(figsize=(7.2, 2.4), layout="constrained")
    axes.plot([16 - p for p in peaks()], color="#c9ced6", lw=0.8, label="overflow above this")
    axes.step(range(STEPS), used, where="post", color="#1f6feb", lw=1.6, label="log2 of the scale")
    axes.plot(lost, [used[i] for i in lost], "x", color="#cf222e", ms=5, label=f"{len(lost)} lost")
    if again:
        label = f"{len(again)} computed again"
        axes.plot(again, [used[i] for i in again], "o", color="#bc8700", ms=4, label=label)
    axes.set_ylim(3, 27)
    axes.set_xlim(0, STEPS)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=4, frameon=False, loc="upper right", fontsize=8)
    axes.set_title(text, loc="left", fontsize=9, family="monospace")
    figure.savefig(folder / f"rule-{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    folder = Path(__file__).parent / "pictures"
    folder.mkdir(exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "gradlift"
    for name, text in RULES.items():
        draw(name, text, folder)
        print(f"docs/pictures/rule-{name}.svg")


if __name__ == "__main__":
    main()
