"""A region: parameters of one group, dtype and device, laid end to end and stepped in pieces.

Small parameters share one stretch of memory, so that thousands of them cost one gather, one step
and one copy. A large 16-bit parameter keeps its own memory and is cut into pieces that stay in the
cache while they are converted, stepped and rounded back.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import MisuseError
from ..names import name_of
from ..scaler.finite_check import flat
from .gradients import SHARED, RegionGradients, flat_like, shaped
from .rounding import ROUNDINGS, FullMasters, Noise, NoiseSeed

BITS = 2  # a room for 16-bit integers; 0 is for weights, 1 for gradients
SMALL = 2**15  # elements: where one more tensor costs about as much as gathering its gradient
_PIECE = {"cpu": 2**18}  # elements: a piece and its state fit a core's cache
_PIECE_ELSEWHERE = 2**25  # bounds the float32 scratch; launches matter more than caches
INFINITE = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # the bits of inf
COUNTERS = {"step", "mu_product", "eta", "mu"}  # one number a parameter, in all of torch.optim


@dataclass(slots=True, eq=False)
class Piece:
    """A range that the inner optimizer steps as one parameter, `weight`."""

    start: int
    stop: int
    source: int
    weight: torch.nn.Parameter
    begun: bool = False


class Region:
    """`group` is the number of the optimizer's group. `update` is None for float32 parameters,
    which need no second copy. If not `elementwise`, the optimizer looks at shapes, and every
    parameter is a piece of its own shape. `places` is where each parameter begins among all of
    the optimizer's."""

    def __init__(
        self,
        group: int,
        params: list[Tensor],
        update: str | None,
        elementwise: bool,
        seed: NoiseSeed,
        places: dict[Tensor, int],
    ) -> None:
        self.group, self.elementwise = group, elementwise
        small = [p for p in params if elementwise and shares(p)]
        # A matrix starts on a cache line: elsewhere its products may be rounded differently. What
        # needs no padding for that comes first; vectors need none at all.
        line = 64 // params[0].element_size()
        small.sort(key=lambda p: (p.dim() < 2, p.numel() % line != 0, p.numel() % 8 != 0))
        kept = {id(p) for p in small}
        self.params = small + [p for p in params if id(p) not in kept]
        self.n_small = len(small)
        self.starts: list[int] = []
        self.room = at = 0
        for i, p in enumerate(self.params):
            aligned = at if p.dim() < 2 and i < self.n_small else -(-at // line) * line
            self.starts.append(aligned)
            at = aligned + p.numel()
            if i == self.n_small - 1:
                self.room = at
        self.total = at
        first = self.params[0]
        self.dtype, self.device = first.dtype, first.device
        self.shared = torch.zeros(self.room, dtype=self.dtype, device=self.device)
        self.gradients = RegionGradients(self.params, self.starts, self.n_small, self.room)
        noise = Noise(seed, [(a, places[p]) for a, p in zip(self.starts, self.params)])
        self.keep = ROUNDINGS[update](at, self.device, noise) if update else None
        self.masters = self.keep.kept if isinstance(self.keep, FullMasters) else None
        self.transient = self.keep is not None and self.masters is None
        """Do float32 weights exist only while they are stepped?"""
        self.out_of_range: bool | Tensor = False
        """Since the last step began: did a 16-bit weight become infinite, and was put back?"""
        self.size = min(at, _PIECE.get(self.device.type, _PIECE_ELSEWHERE))
        self.rooms: dict[tuple[int, int], Tensor] = {}
        self.own: dict[int, Tensor] = {}
        self.strides = [p.stride() for p in self.params]
        self.pointers = [0] * len(self.params)
        self.versions: list[int] = []
        self.marks: dict[int, int] = {}  # of weights that came with a state, until the next step
        self.state: dict[str, Tensor] = {}
        self.pieces: list[Piece] = []
        self.refresh()
        self.lay_out([])
        # One place in each parameter, small ones first, to see changes that leave no other trace.
        self.places = torch.tensor(
            [s + 7919 * i % p.numel() for i, (s, p) in enumerate(zip(self.starts, self.params))],
            device=self.device,
        )

    # Where the weights are

    def attach(self) -> None:
        """Small parameters become views of the shared stretch, with the values they have.

        If any has been given other memory, all move to a new stretch: the old one may be in use
        elsewhere by now.
        """
        moved = [i for i, p in enumerate(self.params) if p.data_ptr() != self.pointers[i]]
        for i in moved:
            p = self.params[i]
            if (p.dtype, p.device, p.stride()) != (self.dtype, self.device, self.strides[i]):
                raise MisuseError(
                    f"{name_of(p)} is now {p.dtype} on {p.device}, with strides {p.stride()}, but "
                    f"was {self.dtype} on {self.device}, with {self.strides[i]}, when "
                    "MasterWeights was made: convert and move the model first"
                )
        if any(i < self.n_small for i in moved):
            self.shared = torch.zeros_like(self.shared)
            for i, p in enumerate(self.params[: self.n_small]):
                a = self.starts[i]
                view = self.shared[a : a + p.numel()].view(p.shape)
                view.copy_(p.detach())
                p.data = view
            for piece in self.pieces:
                if self.keep is None:
                    piece.weight.data = self.shared[piece.start : piece.stop]
        for i in moved:
            if i >= self.n_small:
                p = self.params[i]
                self.own[i] = flat(p.data)  # not detach(): our writes must not count as the user's
                if self.own[i].data_ptr() != p.data_ptr():
                    raise MisuseError(
                        f"{name_of(p)} is scattered in memory, with gaps that belong to something "
                        "else: make it a tensor of its own, p.data = p.data.contiguous()"
                    )
        self.pointers = [p.data_ptr() for p in self.params]

    def check(self) -> None:
        """Have the model's weights been changed behind the optimizer's back?"""
        moved = [p.data_ptr() for p in self.params] != self.pointers
        if moved:
            self.attach()
        if self.keep is None or not self.keep.exact:
            return  # the weight itself is all there is
        versions = [p._version for p in self.params]
        if not moved and versions == self.versions and not self.sample_differs():
            return
        for i, p in enumerate(self.params):
            if (moved or versions[i] != self.versions[i] or not self.transient) and self.drifted(i):
                raise MisuseError(
                    f"{name_of(p)} is not what its float32 master rounds to: the model's weights "
                    "were changed behind the optimizer's back (model.load_state_dict?). Call "
                    "refresh() on the MasterWeights to take them over, or load its state dict too"
                )
        self.versions = versions

    def drifted(self, i: int) -> bool:
        """Of a weight that was written: does what is kept still belong to it?"""
        a, b, model = self.range(i)
        if self.masters is not None:
            return self.differs(self.masters[a:b].to(self.dtype), model)
        if self.marks.get(i) == _mark(model):  # loaded once more, the same
            return False
        return bool(self.keep.kept[a:b].any())  # type: ignore[union-attr]

    def sample_differs(self) -> bool:
        """One weight of each parameter, for changes through `.data`, which leave no version."""
        if self.device.type != "cpu" or self.masters is None:
            return False  # a device would have to be waited for
        small = self.shared.index_select(0, self.places[: self.n_small])
        if self.own:
            own = [w[7919 * i % w.numel()].view(1) for i, w in self.own.items()]
            small = torch.cat([small, *own])
        return self.differs(self.masters.index_select(0, self.places).to(self.dtype), small)

    def differs(self, rounded: Tensor, model: Tensor) -> bool:
        """Are these masters, just rounded, not the model's weights?"""
        if torch.equal(rounded.view(torch.int16), model.view(torch.int16)):
            return False
        most = torch.finfo(self.dtype).max
        rounded.nan_to_num_(nan=math.nan, posinf=most, neginf=-most)  # as `contain` does
        return not ((rounded == model) | (rounded.isnan() & model.isnan())).all()

    def refresh(self, weights: list[Tensor] | None = None) -> None:
        """Takes the model's weights as they are now, or `weights`, in the order of `params`."""
        self.attach()
        for i, p in enumerate(self.params):
            a, b, model = self.range(i)
            if weights is not None:
                value = flat_like(weights[i].to(self.device), p)
                if self.keep is None:
                    model.copy_(value)
                else:
                    self.keep.put(a, b, model, value.float())
                    self.contain(model)
            elif self.keep is not None:
                self.keep.reset(a, b, model)
        self.versions = [p._version for p in self.params]

    def reset(self, i: int) -> None:
        """One parameter's float32 weights are the model's."""
        if self.keep is not None:
            self.keep.reset(*self.range(i))
            self.versions[i] = self.params[i]._version

    def stepped(self) -> None:
        """After a step: the weights' version counters go up, and no gradient is held."""
        taken, self.gradients.taken = self.gradients.taken, None
        self.marks = {}
        if taken is None:
            return
        torch.autograd.graph.increment_version(
            [p for p, g in zip(self.params, taken.grads) if g is not None]
        )
        if self.keep is None:
            return
        self.versions = [p._version for p in self.params]
        for piece in self.pieces if not self.elementwise else ():
            piece.weight.grad = None
            if self.transient:
                piece.weight.data = self.nothing(piece.weight.shape)

    def abandon(self) -> None:
        """After a step that raised: the model's weights are what the masters round to."""
        if self.masters is None:
            return
        for piece in self.pieces:
            self.store(piece)

    def range(self, i: int) -> tuple[int, int, Tensor]:
        """Where one parameter lies, and the model's own weights there, flat."""
        a = self.starts[i]
        b = a + self.params[i].numel()
        return a, b, self.shared[a:b] if i < self.n_small else self.own[i]

    def restore(self, i: int, entry: dict[str, Any]) -> None:
        """Takes a 16-bit weight's master out of its entry of a checkpoint."""
        master = entry.pop("master", None)
        if master is None or self.keep is None or not self.keep.exact:
            return
        a, b, model = self.range(i)
        self.keep.put(a, b, model, flat_like(master, self.params[i]))
        self.contain(model)
        self.versions[i] = self.params[i]._version
        self.marks[i] = _mark(model)

    def extra(self, i: int) -> dict[str, Tensor]:
        """The reverse."""
        return {"master": self.weights(i)} if self.keep is not None and self.keep.exact else {}

    def weights(self, i: int) -> Tensor:
        """One parameter's float32 weights, in its shape."""
        assert self.keep is not None
        a, b, model = self.range(i)
        scratch = torch.empty(model.shape if self.transient else 0, device=model.device)
        return shaped(self.keep.weights(a, b, model, scratch), self.params[i])

    def master(self, i: int) -> Tensor:
        """One parameter's float32 weight, with its float32 gradient if that is being held."""
        if self.keep is None:
            return self.params[i]
        master = self.weights(i)
        master.grad = self.gradients.held(i)
        return master

    # Pieces

    def lay_out(self, cuts: list[int]) -> None:
        """Fresh pieces, none across a cut."""
        stretches = [(0, self.room, SHARED)] if self.room else []
        for i in range(self.n_small, len(self.params)):
            stretches.append((*self.range(i)[:2], i))
        self.pieces = []
        for start, stop, source in stretches:
            step = self.size if self.elementwise and self.keep is not None else stop - start
            marks = {start, stop, *range(start, stop, step)}
            if source == SHARED:
                marks.update(cuts)
            ends = sorted(marks)
            self.pieces += [self.piece(a, b, source) for a, b in pairwise(ends)]

    def piece(self, a: int, b: int, source: int) -> Piece:
        if self.keep is None:
            weight = self.shared[a:b]
        elif self.masters is not None:
            weight = self.in_shape(self.masters[a:b], source)
        else:
            weight = self.nothing((b - a,) if self.elementwise else self.params[source].shape)
        return Piece(a, b, source, torch.nn.Parameter(weight))

    def nothing(self, shape: Any) -> Tensor:
        """Zeros that take no memory, where values exist only during a step."""
        return torch.zeros((), device=self.device).expand(shape)

    def in_shape(self, elements: Tensor, source: int) -> Tensor:
        """Flat elements as the inner optimizer is to see them."""
        return elements if self.elementwise else shaped(elements, self.params[source])

    def with_gradients(self, states: Any) -> list[Piece]:
        """The pieces to step. A parameter without a gradient is left alone, so it is cut out."""
        assert self.gradients.taken is not None
        absent = [grad is None for grad in self.gradients.taken.grads]
        if not any(absent):
            return self.pieces
        self.cut(absent, states)
        return [piece for piece in self.pieces if not absent[self.owner(piece)]]

    def cut(self, absent: list[bool], states: Any) -> None:
        """Splits pieces of which only some parameters have a gradient."""
        marks = [self.starts[i] for i in range(1, self.n_small) if absent[i] != absent[i - 1]]
        pieces = []
        for piece in self.pieces:
            inside = [m for m in marks if piece.source == SHARED and piece.start < m < piece.stop]
            if not inside:
                pieces.append(piece)
                continue
            old = states.pop(piece.weight, {})
            for a, b in pairwise([piece.start, *inside, piece.stop]):
                part = self.piece(a, b, SHARED)
                part.begun = piece.begun
                if old:
                    states[part.weight] = self.state_of(old, a, b)
                pieces.append(part)
        self.pieces = pieces

    def owner(self, piece: Piece) -> int:
        """The parameter that a piece begins in."""
        if piece.source != SHARED:
            return piece.source
        return bisect_right(self.starts, piece.start, hi=self.n_small) - 1

    def model(self, piece: Piece) -> Tensor:
        """The model's own weights of a piece, flat."""
        if piece.source == SHARED:
            return self.shared[piece.start : piece.stop]
        own, start = self.own[piece.source], self.starts[piece.source]
        if own.numel() == piece.stop - piece.start:
            return own
        return own[piece.start - start : piece.stop - start]

    def load(self, piece: Piece, *, alone: bool = False) -> None:
        """Float32 weights into `piece.weight`, if it does not have them all the time; unless they
        are `alone`, until the next piece is loaded."""
        if not self.transient:
            return
        assert self.keep is not None
        room = self.room32(0, piece.stop - piece.start, alone)
        weights = self.keep.weights(piece.start, piece.stop, self.model(piece), room)
        piece.weight.data = self.in_shape(weights, piece.source)

    def store(self, piece: Piece) -> None:
        """Rounds a piece's stepped weights into the model."""
        if self.keep is None:
            return
        weights = piece.weight if self.elementwise else flat(piece.weight.data)
        model = self.model(piece)
        if self.transient:
            self.keep.put(piece.start, piece.stop, model, weights)
        else:
            model.copy_(weights)
        self.contain(model)

    def contain(self, model: Tensor) -> None:
        """16-bit weights that became infinite stay at their format's largest number; then
        `out_of_range` is set. A host reads whether there are any, and writes only then."""
        most = torch.finfo(self.dtype).max
        for part in model.split(self.size):
            n = part.numel()
            if self.device.type == "cpu":
                if (BITS, n) not in self.rooms:  # where the gradient was
                    self.rooms[BITS, n] = self.room32(1, n, False).view(torch.int16)[:n]
                # Without their signs the bits are in the order of the numbers, NaN above all.
                bits = torch.bitwise_and(part.view(torch.int16), 0x7FFF, out=self.rooms[BITS, n])
                if bits.amax().item() < INFINITE[self.dtype] or not part.isinf().any():
                    continue
                self.out_of_range = True
            else:
                self.out_of_range = part.isinf().any() | self.out_of_range
            part.nan_to_num_(nan=math.nan, posinf=most, neginf=-most)

    def at_limit(self) -> list[Tensor]:
        """Parameters with a weight at their format's largest number."""
        most = torch.finfo(self.dtype).max
        return [p for i, p in enumerate(self.params) if (self.range(i)[2].abs() == most).any()]

    def room32(self, which: int, n: int, alone: bool) -> Tensor:
        """Room for n float32 numbers; the same one every time unless it must be had `alone`."""
        if alone:
            return torch.empty(n, device=self.device)
        if (which, n) not in self.rooms:
            whole = self.rooms.setdefault((which, 0), torch.empty(self.size, device=self.device))
            self.rooms[which, n] = whole[:n]
        return self.rooms[which, n]

    def gradient(self, piece: Piece, *, alone: bool = False) -> Tensor:
        """A piece's gradient, as taken, in float32; unless `alone`, until the next is asked for."""
        taken = self.gradients.taken
        assert taken is not None
        source = taken.sources[piece.source]
        n = piece.stop - piece.start
        if source.numel() != n:
            start = piece.start - (0 if piece.source == SHARED else self.starts[piece.source])
            source = source[start : start + n]
        if self.keep is None or taken.shown is not None:
            return source
        return self.room32(1, n, alone).copy_(source)

    # State: one flat tensor a key, of which each piece and each parameter has a view

    def adopt_state(self, piece: Piece, states: Any) -> None:
        """Moves what the optimizer has made for a piece, in its first step mostly, into the flat
        tensors."""
        piece.begun = True
        entry = states.get(piece.weight, {})
        for key, value in entry.items():
            if not isinstance(value, Tensor) or value.shape != (piece.stop - piece.start,):
                continue
            if value._base is None or value._base is not self.state.get(key):
                view = self.flat_state(key, value)[piece.start : piece.stop]
                view.copy_(value)
                entry[key] = view

    def piece_of(self, i: int) -> Piece:
        """The piece in which a parameter begins."""
        return self.pieces[bisect_right([q.start for q in self.pieces], self.starts[i]) - 1]

    def read_state(self, i: int, states: Any) -> dict[str, Any]:
        """One parameter's state, as an optimizer over it alone would have it."""
        entry = states.get(self.piece_of(i).weight, {})
        if not self.elementwise:
            return dict(entry)
        part = self.state_of(entry, *self.range(i)[:2])
        return {k: shaped(v, self.params[i]) if k in self.state else v for k, v in part.items()}

    def state_of(self, entry: dict[str, Any], a: int, b: int) -> dict[str, Any]:
        """A range's part of a state: views of the flat tensors, copies of counters."""
        return {
            k: self.state[k][a:b]
            if k in self.state
            else (v.clone() if isinstance(v, Tensor) else v)
            for k, v in entry.items()
        }

    def leads(self, i: int) -> bool:
        """Does a piece begin with this parameter?"""
        return i < self.n_small and self.piece_of(i).start == self.starts[i]

    def load_state(
        self, entries: list[dict[str, Any]], begun: list[bool], leads: list[bool], states: Any
    ) -> None:
        """Takes each parameter's state; parameters whose counters differ get pieces apart.

        Pieces also begin where they did when the state was saved, since a fused kernel rounds the
        last elements of a tensor differently.
        """
        for piece in self.pieces:
            states.pop(piece.weight, None)
        if self.elementwise:
            kinds = [(b, _kind(e, p)) for b, e, p in zip(begun, entries, self.params)]
            small = range(1, self.n_small)
            cuts = [self.starts[i] for i in small if leads[i] or kinds[i] != kinds[i - 1]]
            self.lay_out(cuts)
            self.state = {}
            for i, (entry, p) in enumerate(zip(entries, self.params)):
                a, b, _ = self.range(i)
                for key, value in entry.items():
                    if _covers(key, value, p):
                        self.flat_state(key, value)[a:b].copy_(flat_like(value, p))
        for piece in self.pieces:
            i = self.owner(piece)
            piece.begun = begun[i]
            if entries[i]:
                states[piece.weight] = self.state_of(entries[i], piece.start, piece.stop)

    def flat_state(self, key: str, like: Tensor) -> Tensor:
        if key not in self.state:
            self.state[key] = torch.zeros(self.total, dtype=like.dtype, device=self.device)
        return self.state[key]


class PieceByPiece(TorchFunctionMode):
    """Hands a fused kernel one piece at a time, each converted just before, rounded just after.

    torch's fused optimizers end in one call with lists of tensors. Converting all gradients before
    it, and rounding all weights after it, would take them through memory three times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[int, tuple[Region, Piece]] = {}
        self.done = 0

    def add(self, region: Region, piece: Piece) -> None:
        if region.keep is None:
            piece.weight.grad = region.gradient(piece)
            return
        self.work[id(piece.weight)] = region, piece
        if piece.weight.grad is None:  # never read: the kernel is given the real one
            piece.weight.grad = region.nothing(piece.weight.shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "__name__", "").startswith("_fused_"):
            return func(*args, **kwargs)
        as_they_are = []
        for i, weight in enumerate(args[0]):
            if id(weight) not in self.work:
                as_they_are.append(i)
                continue
            region, piece = self.work[id(weight)]
            region.load(piece)
            state = [[each[i]] if each else [] for each in args[2:]]
            func([weight], [region.gradient(piece)], *state, **kwargs)
            region.store(piece)
            self.done += 1
        if as_they_are:
            func(*([each[i] for i in as_they_are] if each else [] for each in args), **kwargs)

    def finish(self) -> None:
        """MisuseError unless all were stepped."""
        if self.done != len(self.work):
            raise MisuseError(
                f"this optimizer's fused kernel stepped {self.done} of {len(self.work)} pieces: "
                "this version of torch is not known to MasterWeights; pass fused=False"
            )


def shares(p: Tensor) -> bool:
    """Can it be moved to lie with others: small, plain, and no part of somebody else's tensor?"""
    if not 0 < p.numel() <= SMALL or not p.is_contiguous():
        return False
    return p.untyped_storage().nbytes() == p.numel() * p.element_size()


def _mark(weights: Tensor) -> int:
    """A checksum of 16-bit weights."""
    bits = weights.view(torch.int16).long()
    return int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum())


def _covers(key: str, value: Any, p: Tensor) -> bool:
    """Does it hold one number for each of the parameter's?"""
    return isinstance(value, Tensor) and value.shape == p.shape and key not in COUNTERS


def _kind(entry: dict[str, Any], p: Tensor) -> tuple[Any, ...]:
    """Equal for parameters that can be stepped as one."""
    return tuple(
        (k, None if _covers(k, v, p) else v.tolist() if isinstance(v, Tensor) else v)
        for k, v in sorted(entry.items())
    )
