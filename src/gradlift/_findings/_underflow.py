"""Findings about gradients that are too small: dead layers, lost layers, unused bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .._words import power
from ..formats import FP16
from ..journal import Run, Sample
from ._finding import SHOWN, Finding, lost, times

SAMPLES = 3  # fewer could be an expert that was not chosen, or a layer that starts at zero
LOOKED_AT = 200  # samples, evenly spread: more cost time and say the same
LOST_LAYER = 0.9  # share of a layer's non-zero elements below float16's smallest normal number
LOST_SHARE = 0.1  # of all elements: what a scale should be raised for
WIDE = 0.01  # share below float16's smallest number that shows: never was in float16
UNUSED_BITS = 8  # "auto" keeps 3 to 6 bits for what comes; above that a bit is simply not used
NEARLY_ALWAYS = 0.99  # of the steps

_BOTTOM = round(math.log2(FP16.smallest_subnormal))


@dataclass
class Layer:
    """The gradient elements of one module, over all samples that were looked at.

    A layer is judged as a whole: a bias in front of a batch norm, or of attention's keys, has a
    true gradient of zero, of which only rounding noise is recorded.
    """

    parameters: dict[str, None] = field(default_factory=dict)
    samples: int = 0
    elements: int = 0
    zero: float = 0.0
    subnormal: float = 0.0
    below: int = 0
    """Elements too small for float16: this gradient was computed in a wider format."""

    @property
    def nonzero(self) -> float:
        return self.elements - self.zero

    @property
    def dead(self) -> bool:
        return self.elements > 0 and self.nonzero < 0.5  # counts, rebuilt from shares

    @property
    def narrow(self) -> bool:
        return self.below <= WIDE * self.nonzero

    @property
    def lost(self) -> float:
        """The share of what is not zero that float16 holds with fewer bits, or barely."""
        return self.subnormal / self.nonzero if self.nonzero else 0.0


def dead_layer(run: Run) -> Finding | None:
    """Layers whose gradient was zero, to the last element, in every sample."""
    layers = _layers(run)
    dead = {name: layer for name, layer in layers.items() if layer.dead}
    if not dead:
        return None
    alive = [layer for name, layer in layers.items() if name not in dead]
    flushed = _lost_share(alive) >= LOST_SHARE and not _unscaled(run)
    parameters = [p for layer in dead.values() for p in layer.parameters]
    cause = (
        f"What is left is nearly lost as well ({_lost_share(alive):.0%} of the other layers' "
        "elements are subnormal), so they were flushed to zero."
        if flushed
        else "The other layers' gradients are well in range, so this is hardly a matter of scale."
        if alive
        else "Nothing reaches any parameter."
    )
    return Finding(
        "warning" if alive else "broken",
        f"{times(len(dead), 'layer')} without any gradient: {_named(dead)}",
        f"In {times(max(d.samples for d in dead.values()), 'sample')} all "
        f"{sum(d.elements // d.samples for d in dead.values())} elements were zero, in "
        f"{len(dead)} of {times(len(layers), 'layer')}. {cause}",
        tuple(s.step for s in _looked_at(run)[:SHOWN]),
        tuple(parameters[:SHOWN]),
        'Raise the scale: rule="auto".'
        if flushed or not alive
        else "See whether the layer still reaches the loss (a detach, a branch not taken, units "
        "that are always off); if it should not train, requires_grad_(False).",
        "dead-layer",
    )


def underflow(run: Run) -> Finding | None:
    """Layers nearly all of whose elements are subnormal in float16, or flushed."""
    small = {
        name: layer
        for name, layer in _layers(run).items()
        if layer.narrow and layer.lost >= LOST_LAYER
    }
    if not small or _unscaled(run):
        return None
    small = dict(sorted(small.items(), key=lambda item: -item[1].lost))
    worst = next(iter(small.values()))
    bits = _unused_bits(run)
    room = bits >= UNUSED_BITS
    return Finding(
        "warning",
        f"{times(len(small), 'layer')} below float16's range: {_named(small)}",
        f"Of the first one's gradient {worst.zero / worst.elements:.0%} are zero and "
        f"{worst.lost:.0%} of the rest are subnormal, in {times(worst.samples, 'sample')}. "
        + (
            f"The largest scaled gradient was {bits:.0f} bits below 65504, so there is room above."
            if room
            else f"The largest scaled gradient was {bits:.0f} bits below 65504: no scale fits all."
        ),
        tuple(s.step for s in _looked_at(run)[:SHOWN]),
        tuple(p for layer in small.values() for p in layer.parameters)[:SHOWN],
        'Raise the scale: rule="auto".'
        if room
        else "Give those layers more: keep them in float32 or bfloat16, or scale their loss term "
        "by itself, scaler.scale(loss, key=...).",
        "underflow",
    )


def conservative(run: Run) -> Finding | None:
    """The scale leaves bits unused all the time while elements are lost at the other end."""
    share = _lost_share(list(_layers(run).values()))
    bits = _unused_bits(run)
    if share < LOST_SHARE or bits < UNUSED_BITS or _unscaled(run):
        return None
    scale = max(s.scale for s in run.steps)
    return Finding(
        "hint",
        "The scale is too low: bits are left unused",
        f"In {NEARLY_ALWAYS:.0%} of the steps the largest scaled gradient was at least {bits:.0f} "
        f"bits below 65504, while {share:.0%} of the elements were subnormal in float16.",
        (),
        (),
        f'Use rule="auto", or start from init_scale={power(scale * 2.0 ** (int(bits) - 3))}.',
        "conservative",
    )


def _looked_at(run: Run) -> list[Sample]:
    """Samples of steps that were applied, at most `LOOKED_AT`, evenly spread."""
    bad = {s.step for s in run.steps if lost(s) or s.nonfinite}
    good = [s for s in run.samples if s.step not in bad]
    return good[:: math.ceil(len(good) / LOOKED_AT) or 1]


def _layers(run: Run) -> dict[str, Layer]:
    """Every layer that was sampled often enough."""
    layers: dict[str, Layer] = {}
    seen: dict[str, set[int]] = {}
    for sample in _looked_at(run):
        for name, shares in sample.parameters.items():
            module = name.rpartition(".")[0] or name
            layer = layers.setdefault(module, Layer())
            n = int(shares.get("elements", 0))
            layer.parameters[name] = None
            layer.elements += n
            layer.zero += n * float(shares.get("zero", 0.0))
            layer.subnormal += n * float(shares.get("subnormal", 0.0))
            if shares.get("subnormal"):  # most have none, and counting takes time
                counts = shares.get("exponents", {}).items()
                layer.below += sum(count for e, count in counts if int(e) < _BOTTOM)
            seen.setdefault(module, set()).add(sample.step)
    for module, layer in layers.items():
        layer.samples = len(seen[module])
    return {m: layer for m, layer in layers.items() if layer.samples >= SAMPLES and layer.elements}


def _lost_share(layers: list[Layer]) -> float:
    """The share of subnormal elements in the layers that are in float16."""
    narrow = [layer for layer in layers if layer.narrow]
    nonzero = sum(layer.nonzero for layer in narrow)
    return sum(layer.subnormal for layer in narrow) / nonzero if nonzero else 0.0


def _unscaled(run: Run) -> bool:
    """A script that was only watched, and has no scaler: most likely it does not use float16."""
    return run.header.get("mode") == "profile" and all(s.scale == 1.0 for s in run.steps)


def _unused_bits(run: Run) -> float:
    """Bits between the largest scaled gradient and float16's maximum, nearly always; 0: unknown."""
    known = sorted(s.amax for s in run.steps if 0 < s.amax < math.inf and not lost(s))
    if not known:
        return 0.0
    return math.log2(FP16.max / known[int(NEARLY_ALWAYS * (len(known) - 1))])


def _named(layers: dict[str, Layer]) -> str:
    more = len(layers) - 3
    return ", ".join(list(layers)[:3]) + (f" and {more} more" if more > 0 else "")
