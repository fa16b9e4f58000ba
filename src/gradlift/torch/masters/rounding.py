"""How a 16-bit weight keeps what its last bit cannot hold: the value of `update=`.

| update | kept besides the weight | the step sees | the weight becomes |
|---|---|---|---|
| "masters" | its float32 master, 4 bytes | the master | the master, rounded |
| "split" | the 16 bits that bfloat16 cuts off | both: the master | its upper half |
| "stochastic" | nothing | the weight | rounded up or down by chance, right on average |

Each works on ranges [a, b) of a region's flat layout. `model` is that range of the model's own
weights, flat; `scratch` is room for float32 weights that live only while they are stepped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor

BITS16 = (torch.float16, torch.bfloat16)


class FullMasters:
    """float32 copies, of which the model's weights are the rounded values."""

    exact = True
    """Is there a float32 value that a checkpoint must keep?"""

    def __init__(self, size: int, device: torch.device, noise: Noise) -> None:
        self.kept = torch.zeros(size, device=device)

    def weights(self, a: int, b: int, model: Tensor, scratch: Tensor) -> Tensor:
        """The float32 weights to step."""
        return self.kept[a:b]

    def put(self, a: int, b: int, model: Tensor, weights: Tensor) -> None:
        """Takes float32 weights and rounds them into the model."""
        if weights.data_ptr() != self.kept.data_ptr() + 4 * a:
            self.kept[a:b].copy_(weights)
        model.copy_(weights)

    def reset(self, a: int, b: int, model: Tensor) -> None:
        """The model's weights as they are become the float32 weights."""
        self.kept[a:b].copy_(model)


class SplitMasters:
    """bfloat16 is the upper half of a float32; the lower half is kept, so nothing is lost.

    Halfway cases round away from zero, where copying a master rounds them to even: of the 65,537
    float32 values that round to an even bfloat16, 16 bits can tell only 65,536 apart.
    """

    exact = True

    def __init__(self, size: int, device: torch.device, noise: Noise) -> None:
        self.kept = torch.zeros(size, dtype=torch.int16, device=device)

    def weights(self, a: int, b: int, model: Tensor, scratch: Tensor) -> Tensor:
        bits = scratch.view(torch.int32)
        bits.copy_(model.view(torch.int16))
        bits.bitwise_left_shift_(16).add_(self.kept[a:b])
        return scratch

    def put(self, a: int, b: int, model: Tensor, weights: Tensor) -> None:
        bits = weights.view(torch.int32)
        self.kept[a:b].copy_(bits)  # keeps the lower 16, as a signed number
        model.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))

    def reset(self, a: int, b: int, model: Tensor) -> None:
        self.kept[a:b].zero_()


class StochasticRounding:
    """A weight between two bfloat16 numbers goes to one of them, to the nearer one more often."""

    exact = False

    def __init__(self, size: int, device: torch.device, noise: Noise) -> None:
        self.noise = noise

    def weights(self, a: int, b: int, model: Tensor, scratch: Tensor) -> Tensor:
        return scratch.copy_(model)

    def put(self, a: int, b: int, model: Tensor, weights: Tensor) -> None:
        bits = self.noise.bits16(a, b, weights.device)
        bits.add_(weights.view(torch.int32)).bitwise_right_shift_(16)
        model.view(torch.int16).copy_(bits)

    def reset(self, a: int, b: int, model: Tensor) -> None:
        pass


class NoiseSeed:
    """What all random bits of an optimizer depend on: the seed and the number of its step."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, 0


class Noise:
    """Random bits from the seed, the step and a weight's place among all weights.

    So they are the same however the weights are laid out, and on every device and rank.
    `spans` are (start, place) of each parameter in a region, in order of start.

    >>> noise = Noise(NoiseSeed(0), [(0, 100), (3, 200)])
    >>> noise.places(1, 5, torch.device("cpu"))
    tensor([101, 102, 200, 201], dtype=torch.int32)
    """

    def __init__(self, seed: NoiseSeed, spans: list[tuple[int, int]]) -> None:
        self.seed, self.spans = seed, spans
        self.starts = [start for start, _ in spans]
        self.known: dict[tuple[int, int], Tensor] = {}

    def places(self, a: int, b: int, device: torch.device) -> Tensor:
        first, last = bisect_right(self.starts, a) - 1, bisect_left(self.starts, b)
        parts = []
        for i in range(first, last):
            start, place = self.spans[i]
            stop = self.starts[i + 1] if i + 1 < last else b
            low, high = place + max(a, start) - start, place + stop - start
            parts.append(torch.arange(low, high, dtype=torch.int64, device=device).int())
        if len(parts) == 1:
            return parts[0]
        if (a, b) not in self.known:  # many small parameters: not anew in every step
            self.known[a, b] = torch.cat(parts)
        return self.known[a, b]

    def bits16(self, a: int, b: int, device: torch.device) -> Tensor:
        """For each place an int32 in [0, 2^16): a multiplicative hash, in wrapping arithmetic."""
        key = (self.seed.seed * 0x9E3779B9 + self.seed.step * 0x85EBCA6B) & 0xFFFFFFFF
        x = self.places(a, b, device) ^ _signed(key)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
            x *= _signed(factor)
        return x.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


Rounding = FullMasters | SplitMasters | StochasticRounding
ROUNDINGS: dict[str, type[Rounding]] = {
    "masters": FullMasters,
    "split": SplitMasters,
    "stochastic": StochasticRounding,
}
