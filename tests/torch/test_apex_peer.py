"""apex's own tests (tests/L0/run_amp and run_fp16util), moved to the CPU, in our own words.

A line above each test has the names of apex's own. Those of its CUDA extension `amp_C` are not
here: they skip themselves without it. docs/apex.md has what differs.
"""

import contextlib
import copy
import itertools
import random
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradlift import read_journal, record
from gradlift.apex import amp
from gradlift.apex.fp16_utils import FP16Model
from gradlift.apex.optimizers import FusedSGD
from gradlift.apex.parallel.LARC import LARC
from gradlift.errors import MisuseError, SettingsError

HALF, SINGLE = torch.float16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3")
state = amp._amp_state


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(2809)
    yield
    if state.handle is not None:
        state.handle._deactivate()


# test_basic_casts, test_promotion, test_rnn: amp.init


@pytest.fixture
def handle():
    return amp.init(enabled=True)


def outcome(fn, shape, dtype, *, backward=True):
    """The type of fn(x); its gradient must be of x's own."""
    x = torch.rand(shape).to(dtype).requires_grad_()
    y = fn(x)
    if backward:
        y.float().sum().backward()
        assert x.grad.dtype is dtype
    return y.dtype


B, C, H, K, T = 16, 16, 64, 3, 10
PLAIN, IMAGE, SQUARE = (B, H), (B, C, H, H), (H, H)


def linear():
    m = nn.Linear(H, H)
    return [m, lambda x: functional.linear(x, m.weight, m.bias)]


def conv2d():
    m = nn.Conv2d(C, C, K)
    return [m, lambda x: functional.conv2d(x, m.weight, m.bias)]


def mse_loss():
    target = torch.randn(PLAIN)
    return [lambda x: nn.MSELoss()(x, target), lambda x: functional.mse_loss(x, target)]


def matmul():
    other = torch.randn(SQUARE)
    return [
        lambda x: x.matmul(other),
        lambda x: other.matmul(x),
        lambda x: x @ other,
        lambda x: other @ x,
    ]


# test_linear_is_half, test_conv2d_is_half, test_matmul_method_is_half, test_matmul_op_is_half
@pytest.mark.parametrize(
    ("make", "shape"), [(linear, PLAIN), (conv2d, IMAGE), (matmul, SQUARE)], ids=lambda x: str(x)
)
def test_products_are_half(handle, make, shape):
    for fn, dtype in itertools.product(make(), (SINGLE, HALF)):
        assert outcome(fn, shape, dtype) is HALF


# test_softmax_is_float, test_group_norm_is_float, test_mse_loss_is_float, test_pow_method_is_float,
# test_pow_op_is_float, test_sum_is_float, test_cpu_is_float
@pytest.mark.parametrize(
    ("fns", "shape"),
    {
        "softmax": ([nn.Softmax(dim=1), lambda x: functional.softmax(x, dim=1)], PLAIN),
        "group norm": ([nn.GroupNorm(4, C)], IMAGE),
        "mse loss": (mse_loss(), PLAIN),
        "pow": ([lambda x: x.pow(2.0), lambda x: x**2.0, lambda x: 2.0**x], PLAIN),
        "sum": ([lambda x: x.sum(), lambda x: torch.sum(x)], PLAIN),
        "cpu": ([lambda x: x.cpu()], PLAIN),
    }.values(),
)
def test_what_can_leave_float16_is_single(handle, fns, shape):
    for fn, dtype in itertools.product(fns, (SINGLE, HALF)):
        assert outcome(fn, shape, dtype) is SINGLE


# test_relu_is_match, test_batch_norm_is_match
def test_relu_and_batch_norm_match_their_input(handle):
    norm = nn.BatchNorm2d(C)
    for dtype in (SINGLE, HALF):
        assert outcome(nn.ReLU(), PLAIN, dtype) is dtype
        assert outcome(functional.relu, PLAIN, dtype) is dtype
        assert outcome(norm, IMAGE, dtype) is dtype
    norm.eval()
    for dtype in (SINGLE, HALF):
        assert outcome(norm, IMAGE, dtype, backward=False) is dtype


# test_bce_raises_by_default, test_bce_is_float_with_allow_banned
def test_binary_cross_entropy_of_half_is_refused_unless_allowed(handle):
    x, target = torch.rand(PLAIN).half(), torch.rand(PLAIN)
    both = [
        lambda: nn.BCELoss()(x, target),
        lambda: functional.binary_cross_entropy(x, target),
    ]
    for fn in both:
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            fn()
    handle._deactivate()
    amp.init(enabled=True, allow_banned=True)
    assert [fn().dtype for fn in both] == [SINGLE, SINGLE]


# test_atan2_matches_widest, test_mul_matches_widest, test_inplace_add_matches_self
@pytest.mark.parametrize(
    "fn", [torch.atan2, torch.Tensor.atan2, torch.mul, torch.Tensor.mul, torch.Tensor.add_]
)
def test_functions_of_two_match_the_widest_or_in_place_the_first(handle, fn):
    for dtype, other in itertools.product((HALF, SINGLE), (HALF, SINGLE)):
        leaf = torch.randn(B, dtype=dtype, requires_grad=True)
        out = fn(leaf.clone(), torch.randn(B, dtype=other))
        in_place = fn is torch.Tensor.add_
        assert out.dtype is (dtype if in_place else torch.promote_types(dtype, other))
        out.float().sum().backward()
        assert leaf.grad.dtype is dtype


# test_cat_matches_widest
def test_cat_matches_the_widest(handle):
    halves = [torch.randn(B).half() for _ in range(5)]
    assert torch.cat([*halves, torch.randn(B)]).dtype is SINGLE
    assert torch.cat([*halves, torch.randn(B).half()]).dtype is HALF


# test_inplace_exp_is_error_for_half
def test_in_place_what_can_leave_float16_is_refused(handle):
    x = torch.randn(B)
    assert x.exp_().dtype is SINGLE
    with pytest.raises(NotImplementedError, match=r"exp_ of a float16 tensor.*call \.float\(\)"):
        x.half().exp_()


# test_rnn_cell_is_half, test_gru_cell_is_half, test_lstm_cell_is_half
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_recurrent_cells_are_half(handle, kind, dtype):
    cell, pair = kind(H, H), kind is nn.LSTMCell
    xs = [torch.randn(B, H, dtype=dtype, requires_grad=True) for _ in range(T)]
    hidden = torch.zeros(B, H, dtype=dtype)
    hidden = (hidden, hidden) if pair else hidden
    for x in xs:
        hidden = cell(x, hidden)
        assert (hidden[0] if pair else hidden).dtype is HALF
    (hidden[0] if pair else hidden).float().sum().backward()
    assert {x.grad.dtype for x in xs} == {dtype}


# test_rnn_is_half, test_gru_is_half, test_lstm_is_half
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_recurrent_nets_are_half(handle, kind, layers, both_ways, dtype):
    more = {"nonlinearity": "relu"} if kind is nn.RNN else {}
    net = kind(H, H, num_layers=layers, bidirectional=both_ways, **more)
    x = torch.randn(T, B, H, dtype=dtype, requires_grad=True)
    hidden = torch.zeros(layers * (1 + both_ways), B, H, dtype=dtype)
    out, _ = net(x, (hidden, hidden) if kind is nn.LSTM else hidden)
    assert out.dtype is HALF
    out[-1].float().sum().backward()
    assert x.grad.dtype is dtype


# test_rnn_packed_sequence
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_a_packed_sequence_is_half(handle, dtype):
    net = nn.RNN(H, H, num_layers=2)
    x = torch.randn(T, B, H, dtype=dtype, requires_grad=True)
    lengths = torch.randint(T // 2, T + 1, (B,)).sort(descending=True).values
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
    out, _ = net(packed, torch.zeros(2, B, H, dtype=dtype))
    assert out.data.dtype is HALF
    out.data.float().sum().backward()
    assert x.grad.dtype is dtype


# What apex's tests of amp.init do not look at


def test_init_patches_torch_and_deactivate_puts_all_of_it_back():
    places = (torch, functional, torch.Tensor, torch._VF, nn.RNN, nn.LSTM, nn.GRU)
    before = [dict(vars(place)) for place in places]
    for end in ("deactivate", "initialize", "init"):
        handle = amp.init()
        assert functional.linear is not before[1]["linear"]
        assert handle.is_active()
        if end == "deactivate":
            handle._deactivate()
        elif end == "initialize":
            amp.initialize(nn.Linear(1, 1), opt_level="O0")
        else:
            amp.init()._deactivate()
        assert not handle.is_active()
        assert [dict(vars(place)) for place in places] == before
        x = torch.ones(2, 2)
        assert (x @ x).dtype is SINGLE


def test_functions_inside_torchs_own_are_cast_too_and_casts_can_be_paused(handle):
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 1, 8)
    assert attention(x, x, x)[0].dtype is HALF
    with amp.disable_casts():
        assert attention(x, x, x)[0].dtype is SINGLE
        x.half().exp_()


def test_init_trains_and_skips(handle, capsys):
    w = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    for x in (1.0, 1e37, 2.0):
        optimizer.zero_grad()
        with handle.scale_loss(w.mul(x).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert w.item() == -3.0
    assert "reducing loss scale to 32768.0" in capsys.readouterr().out


def test_what_init_trains_is_recorded(tmp_path):
    with record(tmp_path / "run.jsonl"):
        handle = amp.init()
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            with handle.scale_loss(net(torch.randn(8, 4)).pow(2).mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    run = read_journal(tmp_path / "run.jsonl")
    assert (len(run.steps), run.steps[-1].scale) == (5, state.loss_scalers[0].loss_scale())


def test_a_wrapped_optimizer_has_a_scale_for_each_loss(handle, capsys):
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first = handle.wrap_optimizer(torch.optim.SGD([a], lr=1.0), num_loss=2)
    second = handle.wrap_optimizer(torch.optim.SGD([b], lr=1.0))
    for xs in ((1.0, 2.0), (1e37, 2.0), (1.0, 2.0)):
        first.zero_grad()
        for x in xs:
            with first.scale_loss(a.mul(x).sum()) as scaled_loss:
                scaled_loss.backward()
        first.step()
    with second.scale_loss(b.mul(5.0).sum()) as scaled_loss:
        scaled_loss.backward()
    second.step()
    assert (a.item(), b.item()) == (-6.0, -5.0)
    assert [s.loss_scale() for s in state.loss_scalers] == [2.0**15, 2.0**16, 2.0**16]
    with pytest.raises(MisuseError, match="right after"):
        handle.wrap_optimizer(torch.optim.SGD([b], lr=1.0))
    second.scale_loss(b.sum())
    with pytest.raises(MisuseError, match=r"2 times before step.*num_loss=1"):
        second.scale_loss(b.sum())


def test_init_disabled_casts_and_scales_nothing():
    handle = amp.init(enabled=False)
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([w], lr=1.0))
    loss = (w @ w).sum()
    assert (loss.dtype, handle.is_active()) == (SINGLE, False)
    assert copy.copy(optimizer).param_groups is optimizer.param_groups
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
    with handle.scale_loss(loss, torch.optim.SGD([w], lr=1.0)) as scaled_loss:
        assert scaled_loss is loss


# test_cache


class Product(nn.Module):
    shape = (8, 8)

    def __init__(self, dtype):
        super().__init__()
        n = self.shape[0] * self.shape[1]
        self.weight = nn.Parameter(torch.arange(n, dtype=dtype).view(self.shape))

    def forward(self, x):
        return self.of(x, self.weight)

    @staticmethod
    def of(x, w):
        return x.mm(w).mm(w).sum()


class Power(Product):
    shape = (2, 8)

    @staticmethod
    def of(x, w):
        return (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()


class Promotion(Power):
    @staticmethod
    def of(x, w):
        return ((x * w) * w).sum()


# test_whitelist_module_fp16_weight, ..._fp32_weight, test_blacklist_module_..., test_promote_...
@pytest.mark.parametrize("kind", [Product, Power, Promotion])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_gradients_are_right_after_a_pass_without_gradients(kind, dtype):
    model = kind(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with incoming_half():
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    x = torch.ones(2, 8)

    def step():
        model.weight.grad = None
        loss = model(x).sum()
        state.loss_scalers[0]._loss_scale = 4.0
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert model.weight.grad.dtype is dtype
        exact = model.weight.detach().clone().float().requires_grad_()
        kind.of(x, exact).backward()
        torch.testing.assert_close(model.weight.grad.float(), exact.grad)
        with torch.no_grad():
            model.weight -= 1.0

    step()
    with torch.no_grad():
        model(x)
    step()


@contextlib.contextmanager
def incoming_half():
    """apex's tests allow models with float16 weights so."""
    state.allow_incoming_model_not_fp32 = True
    yield
    state.allow_incoming_model_not_fp32 = False


# test_multiple_models_optimizers_losses, test_fused_sgd


class Two(nn.Module):
    """A weight in float32 and one in float16."""

    def __init__(self, start):
        super().__init__()
        self.weight0 = nn.Parameter(start + torch.arange(2, dtype=SINGLE))
        self.weight1 = nn.Parameter(1.0 + start + torch.arange(2, dtype=HALF))

    def forward(self, x):
        return (x * self.weight0.float() * self.weight1.float()).sum()


def plan(losses, optimizers, momenta, uses):
    """`losses`: models in each; `optimizers`: {model: rate} of each; `uses`: those of each loss."""
    return types.SimpleNamespace(losses=losses, optimizers=optimizers, momenta=momenta, uses=uses)


PLANS = {
    "2models2losses1optimizer": plan([[0], [1]], [{0: 0.25, 1: 0.5}], [0.125], [[0], [0]]),
    "3models2losses1optimizer": plan(
        [[0, 2], [1, 2]], [{0: 0.25, 1: 0.5, 2: 0.125}], [0.125], [[0], [0]]
    ),
    "2models2losses2optimizers": plan([[0], [1]], [{0: 0.25}, {1: 0.5}], [0.125, 0.25], [[0], [1]]),
    "3models2losses2optimizers": plan(
        [[0, 1], [2, 1]], [{0: 0.25, 1: 1.0}, {2: 0.5}], [0.5, 0.25], [[0], [0, 1]]
    ),
}


def fused_sgd(groups, **how):
    return FusedSGD(groups, 0.1, materialize_master_grads=False, **how)


WAYS = [*itertools.product(("none", "model", "optimizer"), (0, 1), (torch.optim.SGD, fused_sgd))]
random.Random(0).shuffle(WAYS)  # the whole product takes minutes; it held as well
X = torch.ones(2)


def made(p, kind=torch.optim.SGD):
    models = [Two(i + 1) for i in range(max(map(max, p.losses)) + 1)]
    optimizers = [
        kind(
            [{"params": models[i].parameters(), "lr": rate} for i, rate in rates.items()],
            momentum=momentum,
        )
        for rates, momentum in zip(p.optimizers, p.momenta)
    ]
    return models, optimizers


def params(models):
    return [q for model in models for q in model.parameters()]


def plainly(p, bad):
    """What plain torch does if the optimizers of `bad`'s loss leave that step out: gradients of
    each step, and the weights at the end."""
    models, optimizers = made(p)
    seen = []
    for i in range(2 if bad is None else 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for its in p.losses:
            sum(models[m](X) for m in its).backward()
        seen.append([q.grad.clone() for q in params(models)])
        for n, optimizer in enumerate(optimizers):
            if bad is None or bad.step != i or n not in p.uses[bad.loss]:
                optimizer.step()
    return seen, params(models)


def injections(p, level):
    yield None
    if level in ("O1", "O2"):
        for step, loss, name in itertools.product((0, 1), (0, 1), ("weight0", "weight1")):
            for model in p.losses[loss]:
                yield types.SimpleNamespace(step=step, loss=loss, name=name, model=model)


def zero(how, models, optimizers):
    if how == "none":
        for q in params(models):
            q.grad = None
    for each in {"model": models, "optimizer": optimizers}.get(how, ()):
        each.zero_grad()


# test_2models2losses1optimizer, test_3models2losses1optimizer, test_2models2losses2optimizers,
# test_3models2losses2optimizers, of each of the two files
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLANS)
def test_several_models_optimizers_and_losses(name, level):
    p, ways = PLANS[name], itertools.cycle(WAYS)
    for bad in injections(p, level):
        expected, final = plainly(p, bad)
        for how, several, kind in itertools.islice(ways, 6 if bad is None else 1):
            models, optimizers = made(p, kind)
            with incoming_half():
                models, optimizers = amp.initialize(
                    models,
                    optimizers,
                    opt_level=level,
                    verbosity=0,
                    cast_model_type=False,
                    num_losses=1 + several,
                )
            for scaler, scale in zip(state.loss_scalers, (4.0, 16.0)):
                scaler._loss_scale = scale
            for i, grads in enumerate(expected):
                zero(how, models, optimizers)
                losses = [sum(models[m](X) for m in its) for its in p.losses]
                hit = bad is not None and bad.step == i
                for n, loss in enumerate(losses):
                    its = [optimizers[o] for o in p.uses[n]]
                    with amp.scale_loss(loss, its, loss_id=n * several) as scaled_loss:
                        scaled_loss.backward()
                        if hit and bad.loss == n:
                            getattr(models[bad.model], bad.name).grad[0] = float("inf")
                if not hit:
                    masters = [q for o in optimizers for q in amp.master_params(o)]
                    for q, grad in zip(masters, grads):
                        torch.testing.assert_close(q.grad.float(), grad.float())
                for optimizer in optimizers:
                    optimizer.step()
            masters = [q for o in optimizers for q in amp.master_params(o)]
            for q, master, reference in zip(params(models), masters, final):
                torch.testing.assert_close(q, reference)
                torch.testing.assert_close(q, master.to(q.dtype))
            if level == "O1":
                state.handle._deactivate()


# test_add_param_group
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_a_parameter_group_is_added_in_mid_run(level, zero_first, twice):
    def run(how, amped):
        models = [Two(1), Two(2)]
        optimizer = torch.optim.SGD(
            [{"params": models[0].parameters(), "lr": 0.25}], momentum=0.125
        )
        if amped:
            with incoming_half():
                models, optimizer = amp.initialize(
                    models, optimizer, opt_level=level, verbosity=0, cast_model_type=False
                )
            state.loss_scalers[0]._loss_scale = 4.0

        def backward(loss, **kwargs):
            if not amped:
                return loss.backward(**kwargs)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                return scaled_loss.backward(**kwargs)

        def step():
            loss = models[0](X) + models[1](X)
            backward(loss, retain_graph=twice)
            if twice:
                backward(loss)
            optimizer.step()

        zero(how, models, [optimizer])
        backward(models[0](X))
        optimizer.step()
        if zero_first:
            zero(how, models, [optimizer])
        optimizer.add_param_group({"params": models[1].parameters(), "lr": 0.5})
        if not zero_first:
            zero(how, models, [optimizer])
        step()
        zero(how, models, [optimizer])
        step()
        return params(models)

    expected = run("optimizer", amped=False)
    for how in ("none", "model", "optimizer"):
        for q, reference in zip(run(how, amped=True), expected):
            torch.testing.assert_close(q, reference.to(q.dtype))


# test_checkpointing


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, 1, 1)
        self.bn1 = nn.BatchNorm2d(6)
        self.param = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return self.bn1(functional.relu(self.conv1(x * self.param)))


def begin(level, num_losses, *, load=None, before=True):
    """A model at this level; `load` is a checkpoint for it, read `before` initialize or after."""

    def read():
        model.load_state_dict(load["model"])
        optimizer.load_state_dict(load["optimizer"])

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if load and before:
        read()
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, num_losses=num_losses, verbosity=0
    )
    if load and not before:
        read()
    return model, optimizer


# test_restoring
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("losses", [1, 2])
def test_a_restored_run_goes_on_as_the_one_that_was_not_interrupted(level, before, losses):
    def step(model, optimizer, x, loss_ids):
        optimizer.zero_grad()
        out = model(x)
        for loss_id in loss_ids:
            with amp.scale_loss(out.mean(), optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward(retain_graph=True)
        optimizer.step()
        return out

    model, optimizer = begin(level, 2 * losses)
    for epoch in range(10):
        x = torch.randn(16, 3, 24, 24)
        out = step(model, optimizer, x, range(losses))
        if epoch == 4:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            floats = [v for v in saved["model"].values() if v.is_floating_point()]
            assert {v.dtype for v in floats} == {SINGLE}
            again = begin(level, 2 * losses, load=saved, before=before)
        elif epoch > 4:
            same = step(*again, x, range(losses, 2 * losses))
            torch.testing.assert_close(out.float(), same.float())
            for a, b in zip(model.state_dict().values(), again[0].state_dict().values()):
                assert torch.equal(a, b)


# test_loss_scale_decrease. It makes a loss NaN, by an input of 2^17: that is not the scale's fault,
# and lowers no scale here; a gradient that leaves float32 does.
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_loss_lowers_its_own_scale(level):
    model, optimizer = begin(level, 3)
    assert (state.opt_properties.loss_scale, state.opt_properties.opt_level) == ("dynamic", level)

    def passes(x, factor, count, loss_id):
        for _ in range(count):
            optimizer.zero_grad()
            with amp.scale_loss(model(x).mean() * factor, optimizer, loss_id) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    x = torch.randn(16, 3, 24, 24)
    for factor, big in ((1.0, 2.0**17), (1e37, 1.0)):
        for loss_id, count in enumerate((0, 1, 2)):
            passes(x * big, factor, count, loss_id)
        powers = (16, 16, 16) if big > 1 else (16, 15, 14)
        assert [s.loss_scale() for s in state.loss_scalers] == [2.0**n for n in powers]
    assert [s["unskipped"] for s in amp.state_dict().values()] == [0, 0, 0]


# test_state_dict
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_model_trains_on_after_its_state_was_taken(level):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert HALF not in {v.dtype for v in model.state_dict().values()}
    x, y = torch.randn(10, 3, 4, 4), torch.randn(10, 6, 4, 4)
    losses = []
    for _ in range(11):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len({*losses}) == len(losses)


# test_larc_mixed_precision: LARC is refused
def test_larc_is_refused_in_words():
    with pytest.raises(SettingsError, match=r"LARC is not here: use timm\.optim\.Lars"):
        LARC(torch.optim.SGD(Two(1).parameters(), lr=0.25, momentum=0.125))


# run_fp16util/test_fp16util


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(10, 10, 2), nn.BatchNorm2d(10, affine=True)

    def forward(self, x):
        return self.conv(self.bn(x))


@pytest.fixture
def fp16_model():
    inner = nn.Sequential(nn.Conv2d(3, 10, 2), nn.BatchNorm2d(10, affine=False), Block(), Block())
    return FP16Model(nn.Sequential(nn.BatchNorm2d(3, affine=True), inner))


# test_params_and_buffers
def test_an_fp16_model_keeps_batch_norms_with_weights(fp16_model):
    inner = fp16_model.network[1]
    kept = {fp16_model.network[0], inner[2].bn, inner[3].bn}
    for module in fp16_model.modules():
        its = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        expected = SINGLE if module in kept else HALF
        assert {t.dtype for t in its if t.is_floating_point()} <= {expected}


# test_output_is_half
def test_an_fp16_models_output_is_half(fp16_model):
    out = fp16_model(torch.randn(64, 3, 16, 32))
    assert out.dtype is HALF
    out.float().sum().backward()
    assert all(p.grad.dtype is p.dtype for p in fp16_model.parameters())
