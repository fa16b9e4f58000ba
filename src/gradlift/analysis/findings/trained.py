"""Findings about what is trained: left out, shared, without gradient, stuck at zero."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...journal import Run
from ..words import count
from .finding import SHOWN, Finding

SAMPLES = 3  # fewer may be chance, such as an expert that was not chosen


def _trained(run: Run) -> dict[str, Any]:
    """The last look at which parameters the optimizers have."""
    return next((e.detail for e in reversed(run.events) if e.what == "trained"), {})


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _listed(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def head_replaced(run: Run) -> Finding | None:
    """An optimizer has parameters that are not used, and lacks some that are."""
    facts = _trained(run)
    left, gone = _names(facts.get("left_out")), _names(facts.get("not_called"))
    if not left or not gone:
        return None
    return Finding(
        "broken",
        f"A module was replaced after the optimizer was made: {_listed(left)}",
        f"{count(len(left), 'parameter')} of the forward pass are in no optimizer, while "
        f"{count(len(gone), 'parameter')} of the optimizer belong to no module that was called.",
        (),
        tuple(left[:SHOWN]),
        "Make the optimizer after the model has its final modules.",
        "head-replaced",
        confidence="certain",
    )


def parameters_left_out(run: Run) -> Finding | None:
    """Parameters that want a gradient, and that no optimizer has."""
    facts = _trained(run)
    left = _names(facts.get("left_out"))
    if not left or _names(facts.get("not_called")):
        return None
    n = facts.get("left_out_count", len(left))
    return Finding(
        "warning",
        f"{count(n, 'parameter')} in no optimizer: {_listed(left)}",
        f"{count(n, 'parameter')} of the forward pass want a gradient and are in no optimizer; "
        f"{facts.get('trained', 0)} are trained.",
        (),
        tuple(left[:SHOWN]),
        "Give them to the optimizer; if they should not train, call requires_grad_(False), which "
        "also saves their gradients.",
        "parameters-left-out",
        confidence="certain",
    )


def parameters_shared(run: Run) -> Finding | None:
    """Parameters that two optimizers step."""
    shared = _names(_trained(run).get("shared"))
    if not shared:
        return None
    return Finding(
        "broken",
        f"Two optimizers have the same parameters: {_listed(shared)}",
        f"{count(len(shared), 'parameter')} are in two optimizers: each steps them, with gradients "
        "of both losses, and each has moments of its own.",
        (),
        tuple(shared[:SHOWN]),
        "Keep each parameter in one optimizer.",
        "parameters-shared",
        confidence="certain",
    )


def _always(run: Run, holds: Any) -> list[str]:
    """Parameters for which something holds in every sample of weights, and in three at least."""
    seen, held = Counter[str](), Counter[str]()
    for sample in run.weights:
        for name, facts in sample.parameters.items():
            seen[name] += 1
            held[name] += bool(holds(facts))
    return [name for name, n in seen.items() if n >= SAMPLES and held[name] == n]


def detached(run: Run) -> Finding | None:
    """Parameters of an optimizer that never get a gradient."""
    idle = set(_names(_trained(run).get("not_called")))  # such as experts that were not chosen
    found = _always(run, lambda facts: facts.get("gradient") == "none")
    without = [name for name in found if name not in idle]
    if not without:
        return None
    samples = len(run.weights)
    return Finding(
        "warning",
        f"No gradient reaches {_listed(without)}",
        f"{count(len(without), 'parameter')} of the optimizer had no gradient at all in "
        f"{count(samples, 'sample')}: the loss does not depend on them.",
        tuple(s.step for s in run.weights[:SHOWN]),
        tuple(without[:SHOWN]),
        "Look for detach(), no_grad(), .data, .item() or a branch not taken between them and the "
        "loss; if they should not train, leave them out of the optimizer.",
        "detached-layer",
        confidence="certain",
    )


def alike(run: Run) -> Finding | None:
    """Matrices whose rows are all equal, and stay so."""
    same = _always(run, lambda facts: facts.get("alike"))
    if not same:
        return None
    last = run.weights[-1].parameters
    zero = [name for name in same if last.get(name, {}).get("amax") == 0]
    what = "zero" if zero else "equal in all rows"
    names = zero or same
    layers = sorted({name.rpartition(".")[0] or name for name in names})
    adapters = len(zero) >= 2 and len({name.rpartition(".")[0] for name in zero}) < len(zero)
    return Finding(
        "broken",
        f"Weights are and stay {what}: {_listed(names)}",
        f"{count(len(names), 'matrix', 'matrices')} in {count(len(layers), 'layer')} were {what} "
        f"in {count(len(run.weights), 'sample')}: a product of two zero factors has no gradient, "
        "and equal rows get equal gradients, so they never become different.",
        tuple(s.step for s in run.weights[:SHOWN]),
        tuple(names[:SHOWN]),
        "Initialise one of the two factors with random numbers (for LoRA: A random, B zero)."
        if adapters
        else "Initialise the weights with random numbers, such as nn.init.kaiming_uniform_; a "
        "zero bias, or one zero layer at the end, is fine.",
        "zero-init",
        confidence="certain",
    )
