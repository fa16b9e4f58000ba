"""A finding about ranks whose journals, beside rank 0's, show another scale or verdict."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

from ...errors import JournalError, JournalWarning
from ...journal import Run, Step, read_journal
from ..words import power
from .finding import SHOWN, Finding

SAME = 1e-9  # relative: an all_reduce gives every rank the same bits
APART = 1e-6  # relative
_NAME = re.compile(r"rank-(\d+)\.jsonl")


def ranks(run: Run) -> Finding | None:
    """A rank had another scale or another verdict than rank 0: their weights now differ."""
    apart: dict[int, tuple[Step, Step]] = {}
    others = _others(run.path)
    for rank, other in others.items():
        difference = _first_difference(run.by_key, other.by_key)
        if difference:
            apart[rank] = difference
    if not apart:
        return _weights_apart(run, others)
    rank, (here, there) = min(apart.items(), key=lambda item: item[1][0].step)
    names = ", ".join(map(str, sorted(apart)[:SHOWN]))
    return Finding(
        "broken",
        "The ranks disagree",
        f"{len(apart)} of {len(others)} other ranks differ from rank 0 (rank {names}). "
        f"First at step {here.step}: rank 0 {_outcome(here)}, rank {rank} {_outcome(there)}. "
        "From there on their weights differ.",
        (here.step,),
        (),
        "Let the ranks decide together: GradScaler(process_group=group).",
        "ranks",
    )


def _weights_apart(run: Run, others: dict[int, Run]) -> Finding | None:
    """Ranks that step with the same gradients have different weights."""
    here = _fingerprints(run)
    for rank, other in others.items():
        for step, (weights, gradients) in _fingerprints(other).items():
            mine = here.get(step, (math.nan, math.nan))
            if math.isclose(mine[1], gradients, rel_tol=SAME) and _differ(mine[0], weights):
                return Finding(
                    "broken",
                    "The ranks have different weights",
                    f"At step {step} rank 0 and rank {rank} stepped with the same gradients (norm "
                    f"{gradients:.6g}), and their weights have the norms {mine[0]:.6g} and "
                    f"{weights:.6g}: they train different models.",
                    (step,),
                    (),
                    "Begin with the same weights on all ranks: DistributedDataParallel, or "
                    "dist.broadcast of every parameter and buffer from rank 0 before the first "
                    "step; or the same torch.manual_seed before the model is made.",
                    "ranks",
                    confidence="certain",
                )
    return None


def _fingerprints(run: Run) -> dict[int, tuple[float, float]]:
    """By step: the norms of all weights and of all gradients."""
    found = {}
    for event in run.events:
        numbers = [event.detail.get(name) for name in ("weights", "gradients")]
        known = all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers)
        if event.what == "ranks" and event.step is not None and known:
            found[event.step] = float(numbers[0]), float(numbers[1])  # type: ignore[arg-type]
    return found


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > APART * max(abs(a), abs(b))


def _others(path: Path | None) -> dict[int, Run]:
    """The other ranks; a journal that cannot be read is left out."""
    found: dict[int, Run] = {}
    if path is None or not path.parent.is_dir():
        return found
    for file in path.parent.iterdir():
        match = _NAME.fullmatch(file.name)
        if match and file != path and not file.is_symlink():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", JournalWarning)
                    found[int(match[1])] = read_journal(file)
            except JournalError:
                continue
    return dict(sorted(found.items()))


def _first_difference(
    here: dict[str, list[Step]], there: dict[str, list[Step]]
) -> tuple[Step, Step] | None:
    """The first pair of steps that differ. A journal that ends earlier is no difference."""
    pairs = [
        (a, b)
        for key in here.keys() & there.keys()
        for a, b in zip(here[key], there[key])
        if a.scale != b.scale or a.verdict is not b.verdict
    ]
    return min(pairs, key=lambda pair: pair[0].step, default=None)


def _outcome(step: Step) -> str:
    verdict = "is undecided" if step.verdict is None else _DID[step.verdict.name]
    return f"{verdict} at {power(step.scale)}"


_DID = {"APPLY": "stepped", "SKIP": "skipped", "RETRY": "retried", "HALT": "halted"}
