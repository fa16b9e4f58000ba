"""What the rule `auto` is meant to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

OURS = ("auto", "auto:cautious")
Rows = dict[str, dict[str, dict[str, Any]]]
"""contender -> kind of trace -> means"""


@dataclass(frozen=True)
class Goal:
    what: str
    where: str
    limit: float
    got: float
    held: bool
    note: str = ""


def _each(
    rows: Rows, kinds: list[str], what: str, key: str, limit: Callable[[str], float]
) -> list[Goal]:
    ours = rows["auto"]
    return [
        Goal(f"auto, retry: {what}", k, limit(k), ours[k][key], ours[k][key] <= limit(k))
        for k in kinds
    ]


def best_peer(rows: Rows, kind: str) -> tuple[str, float]:
    """Who flushes least, and how much; `dynamic` is torch's rule with bounds, so it is no peer."""
    peers = [n for n in rows if n not in (*OURS, "dynamic")]
    best = min(peers, key=lambda n: rows[n][kind]["flushed"])
    return best, float(rows[best][kind]["flushed"])


def judge(rows: Rows) -> list[dict[str, Any]]:
    """Each goal on each kind of trace."""
    kinds = list(rows["auto"])
    torch, cautious = rows["torch"], rows["auto:cautious"]
    goals = _each(rows, kinds, "lost batches", "lost", lambda k: 0)
    goals += _each(rows, kinds, "within 4 bits from step", "settled", lambda k: 1)
    most = {"spikes": 12}
    goals += _each(rows, kinds, "retries in 1,000 steps", "retries", lambda k: most.get(k, 6))
    for kind in kinds:
        name, share = best_peer(rows, kind)
        factor = 1 if kind in ("RL", "recorded rl") else 2
        got, note = rows["auto"][kind]["flushed"], f"{name}, {rows[name][kind]['lost']:.0f} lost"
        said = "% flushed, less than any peer" if factor == 1 else "% flushed, 2 x the best peer"
        limit = factor * share
        held = got < limit if factor == 1 else got <= limit
        goals.append(Goal(f"auto, retry: {said}", kind, limit, got, held, note))
    for kind in kinds:
        limit, got = 2 * torch[kind]["lost"] + 2, cautious[kind]["lost"]
        said = "auto:cautious: lost batches, 2 x torch + 2"
        goals.append(Goal(said, kind, limit, got, got <= limit))
    recorded = [k for k in kinds if k.startswith("recorded")]
    six = [*(k for k in kinds if k not in recorded), "recorded"]
    shares = {n: {k: rows[n][k]["flushed"] for k in kinds} for n in ("torch", "auto:cautious")}
    for of in shares.values():
        of["recorded"] = sum(of[k] for k in recorded) / len(recorded)
    less = [k for k in (*kinds, "recorded") if shares["auto:cautious"][k] < shares["torch"][k]]
    got, more = sum(k in less for k in six), [k for k in kinds if k not in less]
    said = "auto:cautious: flushes less than torch, kinds of trace (recorded: the mean)"
    note = f"more on {', '.join(more)}" if more else ""
    goals.append(Goal(said, "all", len(six) - 1, got, got >= len(six) - 1, note))
    return [asdict(goal) for goal in goals]
