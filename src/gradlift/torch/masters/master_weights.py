"""`MasterWeights`: any optimizer, over float32 copies of 16-bit weights; and flat, so fast."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import MisuseError, SettingsError, StateError, warn
from ...journal import recorder
from ...text import shown
from ..gradient_source import multiply
from ..names import name_of
from .flat_region import Piece, PieceByPiece, Region, shares
from .gradients import MasterGradients, refuse_sparse, shaped
from .inner_optimizer import in_float32, made, refuse, refuse_references
from .rounding import BITS16, ROUNDINGS, NoiseSeed
from .saved_state import (
    SCHEMA,
    StateByParameter,
    check,
    check_groups,
    first_nonfinite,
    nonfinite,
    own_part,
    shadow,
)

# Each element is stepped by itself, so it does not matter which parameter it belongs to. Others
# (Muon, Adafactor, LBFGS, a subclass that may do anything) are given every parameter in its shape.
_ELEMENTWISE = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
}
_OURS = ("fused", "foreach")  # how a step is computed: not taken from a checkpoint
_Entries = dict[Tensor, dict[str, Any]]
# What the inner optimizer has of its own; a scheduler's wrapper around step() stays outside too.
_NOT_TAKEN = {"defaults", "param_groups", "state", "step"}


class MasterWeights(Optimizer):
    """Keeps float32 masters of float16 and bfloat16 parameters, and steps those.

    `optimizer` is a class, with parameters and settings as for the class itself, or an optimizer
    that exists already. To the outside this is that optimizer: its groups, its hooks, its state by
    parameter, in float32. float32 parameters need no master; small ones are stepped together.

    | argument | meaning |
    |---|---|
    | `update` | "masters"; or for bfloat16, with less memory: "split", "stochastic" |
    | `seed` | of stochastic rounding |

    16-bit parameters are stepped by torch's fused kernel unless `fused` or `foreach` is given; a
    model all in float32 gets the class's own default, and so the same bits as the plain optimizer.

    >>> model = torch.nn.Linear(2, 1).to(torch.bfloat16)
    >>> optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-4)
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    ...     optimizer.step()
    >>> optimizer.masters[0].dtype
    torch.float32
    """

    gradient_source = MasterGradients
    _step_supports_amp_scaling = True  # takes grad_scale and found_inf, as fused optimizers do
    _inner: Any = None

    def __init__(
        self,
        optimizer: Optimizer | type[Optimizer],
        params: Any = None,
        *,
        update: str = "masters",
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if update not in ROUNDINGS:
            raise SettingsError(f"update is {update!r}, expected one of {', '.join(ROUNDINGS)}")
        if isinstance(optimizer, MasterWeights):
            raise SettingsError("this is a MasterWeights already")
        taken = made(optimizer, params, settings)
        self.update = update
        self._seed = NoiseSeed(seed)
        self._just_taken = False  # MasterGradients sets it for the step after `find`
        self.out_of_range: bool | Tensor = False
        super().__init__(taken.param_groups, taken.defaults)
        self._begin(type(taken), vars(taken))
        self._taken_over: Optimizer | None = taken
        for name, hooks in vars(taken).items():
            if name.endswith("_hooks"):
                setattr(self, name, hooks)
        if taken.state:
            self._put({p: in_float32(p, taken.state.get(p, {})) for p in self._all()})
            others = {k: v for k, v in taken.state.items() if not isinstance(k, Tensor)}
            self._inner.state.update(others)
            taken.state.clear()

    # Groups

    def _begin(self, kind: type[Optimizer], attributes: dict[str, Any]) -> None:
        """Makes the inner optimizer, of that class, and lays out all groups."""
        own = {k: v for k, v in attributes.items() if k not in _NOT_TAKEN and "_hooks" not in k}
        self._inner = object.__new__(kind)
        Optimizer.__setstate__(
            self._inner,
            {**own, "defaults": self.defaults, "param_groups": [], "state": defaultdict(dict)},
        )
        self._elementwise = kind in _ELEMENTWISE
        self._places: list[_Places] = []
        self._regions: list[Region] = []
        self._home: dict[Tensor, tuple[Region, int]] = {}
        remembers = issubclass(kind, torch.optim.LBFGS)  # its one group's parameters, by itself
        refuse_references(kind, {} if remembers else own, self._all())
        for group in self.param_groups:
            self._lay_out(group)
        if remembers:
            self._inner._params = self._inner.param_groups[0]["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer; the new parameters get masters of their own."""
        super().add_param_group(param_group)
        if self._inner is not None:
            try:
                self._lay_out(self.param_groups[-1])
            except Exception:
                del self.param_groups[-1]
                raise

    def _lay_out(self, group: dict[str, Any]) -> None:
        params = group["params"]
        trained = [p for p in params if p.requires_grad or p.grad is not None]
        refuse(trained, self.update)
        waiting = [p for p in params if not (p.requires_grad or p.grad is not None)]
        self._places.append(_Places(params, waiting))
        self._inner.param_groups.append({**group, "params": []})
        self._adopt(len(self._places) - 1, trained)

    def _adopt(self, g: int, params: list[Tensor]) -> None:
        """Gives parameters a place: in a region, or with the inner optimizer as they are."""
        places, together = self._places[g], defaultdict(list)
        ends = accumulate((p.numel() for p in self._all()), initial=0)
        begins = dict(zip(self._all(), ends))
        for p in params:
            if p.dtype in BITS16 or (self._elementwise and shares(p)):
                if p.numel():
                    together[p.dtype, p.device].append(p)
            else:
                places.direct.append(p)
        for (dtype, _), members in together.items():
            update = self.update if dtype in BITS16 else None
            region = Region(g, members, update, self._elementwise, self._seed, begins)
            self._regions.append(region)
            self._home.update({p: (region, i) for i, p in enumerate(region.params)})
        self._regions.sort(key=lambda region: region.group)
        narrow = {p for p, (region, _) in self._home.items() if region.keep is not None}
        places.plain = [p for p in places.params if p not in narrow]
        if not self._elementwise:  # such an optimizer may look at all its parameters at any time
            here = [region for region in self._regions if region.group == g]
            pieces = [piece.weight for region in here for piece in region.pieces]
            self._inner.param_groups[g]["params"][:] = places.direct + pieces

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # Gradients: where they are, for GradScaler and for step

    def _take(self) -> None:
        """Finds all gradients, those of parameters that were frozen until now among them."""
        for group, places in zip(self.param_groups, self._places):
            now = group["params"]
            if len(now) != len(places.params) or not all(map(is_, now, places.params)):
                raise MisuseError(
                    "param_groups[...]['params'] was changed: add parameters with "
                    "add_param_group(), or make a new MasterWeights"
                )
            for p in places.direct:
                if p.dtype in BITS16:
                    raise MisuseError(
                        f"{name_of(p)} is now {p.dtype}, but was not when MasterWeights was made: "
                        "convert the model first"
                    )
                if p.grad is not None and p.grad.layout is not torch.strided:
                    refuse_sparse(p)
            if places.waiting:
                self._thaw(lambda p: p.grad is not None)
        for region in self._regions:
            region.gradients.take()

    def _thaw(self, needs_a_place: Callable[[Tensor], bool]) -> None:
        for g, places in enumerate(self._places):
            thawed = [p for p in places.waiting if needs_a_place(p)]
            if thawed:
                refuse(thawed, self.update)
                places.waiting = [p for p in places.waiting if not needs_a_place(p)]
                self._adopt(g, thawed)

    def _multiply_direct(self, factor: float | Tensor) -> None:
        params = [p for places in self._places for p in places.direct if p.grad is not None]
        multiply(params, [p.grad for p in params if p.grad is not None], factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any optimizer."""
        for region in self._regions:
            region.gradients.taken = None
        super().zero_grad(set_to_none)

    # step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Gradients up to float32, the inner optimizer's step, weights back down.

        An optimizer that evaluates its closure by itself (LBFGS) is given one that keeps the
        model's weights and the masters' gradients up to date.
        """
        loss = None
        if closure is not None and self._elementwise:
            with torch.enable_grad():
                loss = closure()
        inner = self._inner
        if self._taken_over is not None:  # for a scheduler that was made of it
            vars(self._taken_over)["_opt_called"] = True
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        fused = "fused" in self.defaults and all(map(itemgetter("fused"), self.param_groups))
        if found_inf is not None and self._must_know(found_inf, fused):
            if found_inf.item():
                return loss
            found_inf = None
        for ours, theirs in zip(self.param_groups, inner.param_groups):
            theirs.update({**ours, "params": theirs["params"]})
        with torch.no_grad():
            if not self._just_taken:
                self._take()
            for region in self._regions:
                region.check()
                region.out_of_range = False
            try:
                if closure is not None and not self._elementwise:
                    loss = self._step(None, False, self._up_to_date(closure))
                elif fused:
                    if isinstance(grad_scale, float):
                        grad_scale = torch.tensor(grad_scale, dtype=torch.float32)
                    inner.grad_scale, inner.found_inf = grad_scale, found_inf
                    self._step(None, fused)
                else:
                    self._step(None if grad_scale is None else 1 / grad_scale, fused)
            except BaseException:
                for region in self._regions:
                    region.abandon()
                raise
            finally:
                vars(inner).pop("grad_scale", None), vars(inner).pop("found_inf", None)
        for ours, theirs in zip(self.param_groups, inner.param_groups):
            ours.update({**theirs, "params": ours["params"]})
        self._seed.step += 1
        self.out_of_range = False
        for region in self._regions:
            region.stepped()
            if region.out_of_range is not False:
                self.out_of_range = region.out_of_range | self.out_of_range
        if self.out_of_range is True and not recorder.depth:  # a scaler's result says so else
            names = ", ".join(name_of(p) for p in self.at_limit()[:3])
            warn(f"masters left the range of their 16-bit weights, which stay at its end: {names}")
        return loss

    def at_limit(self) -> list[Tensor]:
        """Parameters with a 16-bit weight at its format's largest number."""
        narrow = (region for region in self._regions if region.keep is not None)
        return [p for region in narrow for p in region.at_limit()]

    def _must_know(self, found_inf: Tensor, fused: bool) -> bool:
        """Is the verdict needed before the step? On a device that means waiting for it."""
        fresh = any(not piece.begun for region in self._regions for piece in region.pieces)
        # Fused SGD leaves its momentum uninitialised if its first step is skipped.
        unsafe = fresh and isinstance(self._inner, torch.optim.SGD)
        return found_inf.device.type == "cpu" or not fused or unsafe

    def _step(self, factor: Any, fused: bool, *closure: Callable[[], Any]) -> Any:
        """`factor` is None if the inner optimizer takes it by itself."""
        if factor is not None:
            self._multiply_direct(factor)
        if not self._elementwise:
            self._pull(factor)
            loss = self._bare_step(*closure)
            self._push()
            return loss
        together = {g: list(places.direct) for g, places in enumerate(self._places)}
        pieces = PieceByPiece()
        for region in self._regions:
            for piece in region.with_gradients(self._inner.state):
                if fused and piece.begun:
                    pieces.add(region, piece)
                    together[region.group].append(piece.weight)
                else:
                    self._step_piece(region, piece, factor)
        with pieces if fused else contextlib.nullcontext():
            self._step_inner(together)
        pieces.finish()
        for region, piece in pieces.work.values():
            region.adopt_state(piece, self._inner.state)
        return None

    def _step_piece(self, region: Region, piece: Piece, factor: Any) -> None:
        """Converts, steps and rounds one piece by itself."""
        region.load(piece)
        gradient = region.gradient(piece)
        piece.weight.grad = gradient if factor is None else gradient.mul_(factor)
        self._step_inner({region.group: [piece.weight]})
        piece.weight.grad = None
        region.store(piece)
        region.adopt_state(piece, self._inner.state)

    def _step_inner(self, params: dict[int, list[Tensor]]) -> None:
        """The inner optimizer's step, over just these parameters of its groups."""
        groups = self._inner.param_groups
        chosen = [{**groups[g], "params": members} for g, members in params.items() if members]
        if not chosen:
            return
        self._inner.param_groups = chosen
        try:
            self._bare_step()
        finally:
            self._inner.param_groups = groups

    def _bare_step(self, *args: Any) -> Any:
        """The inner optimizer's step without torch's hooks, which were called for ours."""
        step: Any = type(self._inner).step
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self._inner, *args)

    def _pull(self, factor: Any = None) -> None:
        """All float32 weights and gradients at once, each parameter in its shape."""
        for region in self._regions:
            taken = region.gradients.taken
            assert taken is not None
            for piece in region.pieces:
                p = region.params[piece.source]
                region.load(piece, alone=True)
                piece.weight.grad = None
                if taken.grads[piece.source] is not None:
                    gradient = region.gradient(piece, alone=True)
                    gradient = gradient if factor is None else gradient.mul_(factor)
                    piece.weight.grad = shaped(gradient, p)

    def _push(self) -> None:
        for region in self._regions:
            for piece in region.pieces:
                if piece.weight.grad is not None:
                    region.store(piece)
                    piece.begun = True

    def _up_to_date(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that rounds the masters into the model first, and then takes the gradients."""

        def synchronised() -> Any:
            self._push()
            with torch.enable_grad():
                loss = closure()
            self._take()
            self._pull()
            return loss

        return synchronised

    # Weights

    @property
    def masters(self) -> list[Tensor]:
        """The float32 weights, in the order of the parameters.

        With `update="masters"` these are the masters themselves, with "split" they are put
        together anew; a float32 parameter is its own master. After `scaler.unscale_(optimizer)`
        each has its float32 gradient as `.grad`.
        """
        return [self._master(p) for p in self._all()]

    def _master(self, p: Tensor) -> Tensor:
        if p in self._home:
            region, i = self._home[p]
            return region.master(i)
        return p.detach().float() if p.dtype in BITS16 else p

    def refresh(self, weights: Iterable[Tensor] | None = None) -> None:
        """Takes the model's weights as they are now, after `model.load_state_dict`.

        `weights`, in the order of the parameters, are float32 values to take instead: those of a
        float32 checkpoint, say, of which the model can hold only the rounded ones.

        >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> optimizer = MasterWeights(torch.optim.SGD, [w], lr=0.1)
        >>> optimizer.refresh([torch.tensor([1.001])])
        >>> w.data, optimizer.masters
        (tensor([1.], dtype=torch.bfloat16), [tensor([1.0010])])
        """
        params = self._all()
        given = None if weights is None else list(weights)
        if given is not None:
            _check_weights(given, params)
        values = dict(zip(params, given or []))
        with torch.no_grad():
            for p in params:
                if p not in self._home and p in values:
                    p.copy_(values[p])
            for region in self._regions:
                region.refresh([values[p] for p in region.params] if values else None)

    # State, by parameter

    @property
    def state(self) -> Any:
        """Each parameter's state, as its own optimizer would have it; in float32."""
        return StateByParameter(self)

    @state.setter
    def state(self, value: Any) -> None:
        if self._inner is not None:  # not yet in Optimizer's constructor
            self._put(dict(value))

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's over float32 parameters, which can load it.

        A 16-bit weight's master is in its entry of "state", as "master", or in "gradlift" as long
        as it was never stepped and has no entry.
        """
        saved = super().state_dict()
        apart, leads = {}, []
        for i, p in enumerate(self._all()):
            if p in self._home:
                region, at = self._home[p]
                if not saved["state"].get(i):
                    apart[i] = region.extra(at)
                if region.leads(at):
                    leads.append(i)
        own = {"schema": SCHEMA, "update": self.update, "noise": vars(self._seed).copy()}
        saved["gradlift"] = {**own, "apart": apart, "leads": leads}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Loads what this or a plain optimizer saved; damage is refused and changes nothing.

        A NaN or inf in a master or a moment is damage. Without `strict` such a parameter begins
        anew: its master is the model's weight, its moments are empty; a warning names it.
        """
        if not isinstance(state_dict, dict):
            raise StateError(f"an optimizer state is a dict, this is {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        plain = shadow(self)
        try:
            plain.load_state_dict(state_dict)
        except Exception as error:  # torch relies on the layout, and fails in many ways
            raise StateError(
                f"this optimizer state cannot be loaded: {shown(error, 200)}"
            ) from error
        seed, apart, leads = own_part(state_dict.get("gradlift", {}))
        params = self._all()
        stand_ins = [p for group in plain.param_groups for p in group["params"]]
        entries = {p: plain.state.get(s, {}) for p, s in zip(params, stand_ins)}
        extras = {p: apart.get(i, {}) for i, p in enumerate(params)}
        check_groups(plain.param_groups, self.param_groups)
        anew = []
        if not strict:
            anew = [p for p in params if nonfinite(entries[p]) or nonfinite(extras[p])]
            for p in anew:
                entries[p], extras[p] = {}, {}
        check(self, entries, extras)
        for ours, theirs in zip(self.param_groups, plain.param_groups):
            keep = ("params", *_OURS)
            ours.update({k: v for k, v in theirs.items() if k not in keep})
        self._put(entries, extras, {params[i] for i in leads if i < len(params)})
        self._inner.state.update(
            {k: v for k, v in plain.state.items() if not isinstance(k, Tensor)}
        )
        vars(self._seed).update(seed)
        for p in anew:
            if p in self._home:
                region, i = self._home[p]
                with torch.no_grad():
                    region.reset(i)
        if anew:
            names = ", ".join(name_of(p) for p in anew[:5])
            warn(f"the state of {names} was not finite: it begins anew from the model's weights")
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _put(
        self, entries: _Entries, extras: _Entries | None = None, leads: Collection[Tensor] = ()
    ) -> None:
        """Takes over each parameter's state, and its master where there is one."""
        states, extras = self._inner.state, extras or {}
        self._thaw(lambda p: bool(entries.get(p) or extras.get(p)))  # frozen, but stepped before
        with torch.no_grad():
            for p in self._all():
                if p not in self._home:
                    states.pop(p, None)
                    if entries.get(p):
                        states[p] = entries[p]
            for region in self._regions:
                its = [dict(entries.get(p, {})) for p in region.params]
                begun = [bool(entry) for entry in its]
                for i, (p, entry) in enumerate(zip(region.params, its)):
                    region.restore(i, entry or dict(extras.get(p, {})))
                region.load_state(its, begun, [p in leads for p in region.params], states)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """The parameters, and all else by parameter: a copy lays itself out anew."""
        taken = {k: v for k, v in vars(self._inner).items() if k not in _NOT_TAKEN}
        return {
            "kind": type(self._inner),
            "attributes": {k: v for k, v in taken.items() if "_hooks" not in k},
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "update": self.update,
            "saved": self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.update, self._seed, self._just_taken = state["update"], NoiseSeed(0), False
        self.out_of_range = False
        super().__setstate__({k: state[k] for k in ("defaults", "param_groups")})
        self._taken_over = None
        for p in self._all():  # a copy's parameters need not share memory any more
            if p.untyped_storage().nbytes() != p.numel() * p.element_size():
                p.data = p.data.clone()
        self._begin(state["kind"], state["attributes"])
        self.load_state_dict(state["saved"])


class _Places:
    """Where a group's parameters are, if not in regions."""

    def __init__(self, params: list[Tensor], waiting: list[Tensor]) -> None:
        self.params = list(params)
        self.direct: list[Tensor] = []
        """With the inner optimizer."""
        self.plain: list[Tensor] = []
        """Those that are no 16-bit parameters in a region."""
        self.waiting = waiting
        """Frozen so far."""


def _check_weights(weights: list[Any], params: list[Tensor]) -> None:
    if len(weights) != len(params):
        raise StateError(f"refresh() got {len(weights)} weights for {len(params)} parameters")
    for w, p in zip(weights, params):
        if isinstance(w, Tensor) and (bad := first_nonfinite(w)):
            raise StateError(f"refresh() got weights for {name_of(p)} of which one is {bad}")
        if not isinstance(w, Tensor) or w.shape != p.shape:
            shape = tuple(w.shape) if isinstance(w, Tensor) else type(w).__name__
            raise StateError(f"refresh() got {shape} for {name_of(p)}, of shape {tuple(p.shape)}")
