"""Findings about gradients that are too small: zero, subnormal, or with unused bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ...formats import FP16, Shares
from ...journal import Run
from ..exponents import Tally, looked_at
from ..words import count, power
from .finding import SHOWN, Finding

SAMPLES = 3  # fewer could be an expert that was not chosen, or a layer that starts at zero
LOST_LAYER = 0.9  # share of a layer's non-zero elements below float16's smallest normal number
ENOUGH = 100  # elements: fewer cannot show in which format they were computed
HALF = 0.5  # of a layer's elements
LOST_SHARE = 0.1  # of all elements: what a scale should be raised for
WIDE = 0.01  # share below float16's smallest number that shows: never was in float16
UNUSED_BITS = 8  # "auto" keeps 3 to 6 bits in reserve; more are not needed
NEARLY_ALWAYS = 0.99  # of the steps


@dataclass
class Layer:
    """The gradient elements of one module, over all samples that were looked at.

    A layer is judged as a whole: a bias in front of a batch norm, or of attention's keys, has a
    true gradient of zero, of which only rounding noise is recorded.
    """

    parameters: dict[str, None] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)
    bias: Tally = field(default_factory=Tally)
    """Of the biases, whose gradients are sums of what flows back into the layer."""

    @property
    def samples(self) -> int:
        return len(self.steps)

    @property
    def nonzero(self) -> int:
        return self.tally.elements - self.tally.zeros

    @cached_property
    def shares(self) -> Shares:
        """Of the elements that are not zero."""
        return FP16.shares(self.tally.scaled(), self.nonzero)

    @property
    def narrow(self) -> bool:
        """Was it computed in float16? A wider format has elements that float16 flushes."""
        return self.shares.flushed <= WIDE

    @property
    def lost(self) -> float:
        """The share of what is not zero that lies below float16's normal numbers."""
        return self.shares.flushed + self.shares.subnormal

    @property
    def starved(self) -> bool:
        """Are most of its gradients zero, and what flows back into it subnormal where it is not?
        Large inputs can make the weights' gradients look sound."""
        rest = self.bias.elements - self.bias.zeros
        below = FP16.shares(self.bias.scaled(), rest) if rest else None
        return (
            self.tally.zeros >= HALF * self.tally.elements > 0
            and below is not None
            and below.flushed + below.subnormal >= LOST_LAYER
            and self.tally.zeros < self.tally.elements
        )

    @property
    def shown(self) -> str:
        """What was seen, in words."""
        zero = self.tally.zeros / self.tally.elements
        if self.lost >= LOST_LAYER:
            return (
                f"Of the first layer's elements {zero:.0%} are zero, and {self.lost:.0%} of the "
                "rest are subnormal"
            )
        return (
            f"Of the first layer's elements {zero:.0%} are zero, and what is left of its bias's "
            "gradient is subnormal"
        )


def dead_layer(run: Run) -> Finding | None:
    """Layers whose gradient was zero, to the last element, in every sample."""
    layers = _layers(run)
    empty = {name: layer for name, layer in layers.items() if not layer.nonzero}
    if not empty:
        return None
    others = [layer for name, layer in layers.items() if name not in empty]
    if underflow(run) is not None:
        return None  # it names them
    flushed = _lost_share(others) >= LOST_SHARE and not _unscaled(run)
    parameters = [p for layer in empty.values() for p in layer.parameters]
    cause = (
        f"{_lost_share(others):.0%} of the other layers' elements are subnormal, so these were "
        "probably flushed to zero."
        if flushed
        else "The other layers' gradients are in range, so the scale is probably not the cause."
        if others
        else "No parameter has a gradient."
    )
    return Finding(
        "warning" if others else "broken",
        f"{count(len(empty), 'layer')} without any gradient: {_named(empty)}",
        f"In {count(max(d.samples for d in empty.values()), 'sample')} all "
        f"{sum(d.tally.elements // d.samples for d in empty.values())} elements were zero, in "
        f"{len(empty)} of {count(len(layers), 'layer')}. {cause}",
        tuple(s.sample.step for s in looked_at(run)[:SHOWN]),
        tuple(parameters[:SHOWN]),
        'Raise the scale: rule="auto".'
        if flushed or not others
        else "Check whether the loss depends on the layer (a detach, a branch not taken, units "
        "that are always off); if it should not train, requires_grad_(False).",
        "dead-layer",
    )


def dead_layers(run: Run) -> list[str]:
    """The names of layers whose gradient was zero, to the last element, in every sample."""
    return [name for name, layer in _layers(run).items() if not layer.nonzero]


def underflow(run: Run) -> Finding | None:
    """Layers nearly all of whose elements are subnormal in float16, or flushed."""
    layers = _layers(run)
    small = _small(layers)
    if not small or _unscaled(run):
        return None
    empty = {name: layer for name, layer in layers.items() if not layer.nonzero}
    gone = f" {count(len(empty), 'layer')} without any gradient: {_named(empty)}." * bool(empty)
    small = dict(sorted(small.items(), key=lambda item: -item[1].lost))
    worst = next(iter(small.values()))
    bits = _unused_bits(run)
    room = bits >= UNUSED_BITS
    return Finding(
        "warning",
        f"{count(len(small), 'layer')} below float16's range: {_named(small)}",
        f"{worst.shown}, in {count(worst.samples, 'sample')}. "
        + (
            f"The largest scaled gradient was {bits:.0f} bits below 65504, so a larger scale fits."
            if room
            else f"The largest scaled gradient was {bits:.0f} bits below 65504: no scale fits all."
        )
        + gone,
        tuple(s.sample.step for s in looked_at(run)[:SHOWN]),
        tuple(p for layer in small.values() for p in layer.parameters)[:SHOWN],
        'Raise the scale: rule="auto".'
        if room
        else "Keep those layers in float32 or bfloat16, or give their loss term a scale of its "
        "own: scaler.scale(loss, key=...).",
        "underflow",
    )


def conservative(run: Run) -> Finding | None:
    """The scale leaves bits unused in nearly all steps, while small elements are lost."""
    layers = _layers(run)
    small = _small(layers)
    if small and len(small) < HALF * len(layers):
        return None  # `underflow` names them
    share = _lost_share(list(layers.values()))
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


def _layers(run: Run) -> dict[str, Layer]:
    """Every layer that was sampled often enough."""
    layers: dict[str, Layer] = {}
    for sample, *_ in looked_at(run):
        for name, shares in sample.parameters.items():
            layer = layers.setdefault(name.rpartition(".")[0] or name, Layer())
            layer.parameters[name] = None
            layer.steps.add(sample.step)
            layer.tally.add(shares)
            if name.endswith("bias"):
                layer.bias.add(shares)
    return {m: x for m, x in layers.items() if x.samples >= SAMPLES and x.tally.elements}


def _small(layers: dict[str, Layer]) -> dict[str, Layer]:
    """Those that are below float16's range."""
    return {
        name: layer
        for name, layer in layers.items()
        if layer.narrow
        and (
            (layer.lost >= LOST_LAYER and layer.nonzero >= ENOUGH)
            or (layer.starved and layer.tally.elements >= ENOUGH)
        )
    }


def _lost_share(layers: list[Layer]) -> float:
    """The share of subnormal elements in the layers that are in float16."""
    narrow = [layer for layer in layers if layer.narrow]
    nonzero = sum(layer.nonzero for layer in narrow)
    return sum(layer.lost * layer.nonzero for layer in narrow) / nonzero if nonzero else 0.0


def _unscaled(run: Run) -> bool:
    """A script without a scaler, which probably does not use float16."""
    return run.header.get("rule") == "off"


def _unused_bits(run: Run) -> float:
    """The headroom that nearly all steps have; 0 if none is known."""
    rooms = [s.headroom() for s in run.steps if not s.skipped]
    known = sorted((room for room in rooms if room == room), reverse=True)
    return known[int(NEARLY_ALWAYS * (len(known) - 1))] if known else 0.0


def _named(layers: dict[str, Layer]) -> str:
    more = len(layers) - 3
    return ", ".join(list(layers)[:3]) + (f" and {more} more" if more > 0 else "")
