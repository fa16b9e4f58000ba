"""Training with 16-bit weights: half_model, and runs that must end where float32's end."""

import collections
import copy
import dataclasses
import pickle
import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradlift.errors import SettingsError
from gradlift.torch import GradScaler, MasterWeights, half_model

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Small, but a real one: embedding tied to the head, attention, norms."""

    def __init__(self, vocabulary=12, width=32, length=16):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def sequences(g, n=16, length=17):
    """A walk: from the token before to (5 t + 3) mod 12, or, one time in five, to anywhere."""
    rows = [torch.randint(0, 12, (n,), generator=g)]
    while len(rows) < length:
        lost = torch.rand(n, generator=g) < 0.2
        anywhere = torch.randint(0, 12, (n,), generator=g)
        rows.append(torch.where(lost, anywhere, (5 * rows[-1] + 3) % 12))
    return torch.stack(rows, 1)


def trained(seed, dtype=None, update="masters", steps=150):
    torch.manual_seed(seed)
    model = GPT()
    if dtype is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    else:
        model = half_model(model, dtype)
        optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=4e-3, update=update)
    scaler = GradScaler("cpu", rule="auto", enabled=dtype is FP16)
    g = torch.Generator().manual_seed(seed + 100)
    losses = []
    for _ in range(steps):
        tokens = sequences(g)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        assert logits.dtype is FP32
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        losses.append(loss.item())
    return statistics.fmean(losses[-20:]), model, optimizer


def test_an_all_float16_gpt_ends_where_float32_ends():
    seeds = range(4)
    full = [trained(s)[0] for s in seeds]
    assert max(full) < 1.2  # it has learnt: guessing costs log(12) = 2.48, knowing the walk 0.92
    noise = statistics.stdev(full)
    for dtype in (FP16, BF16):
        half = [trained(s, dtype)[0] for s in seeds]
        assert abs(statistics.fmean(half) - statistics.fmean(full)) < noise / 10, (full, half)
    lean = trained(0, BF16, "split")[0]
    assert abs(lean - full[0]) < noise / 10


def test_without_masters_the_same_training_falls_behind():
    """What it is all for: the plain optimizer over bfloat16 weights loses small updates."""

    def fine_tuned(masters):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False).to(BF16)
        target = layer.weight.detach().float() * 1.02
        made = MasterWeights if masters else (lambda kind, *a, **k: kind(*a, **k))
        optimizer = made(torch.optim.SGD, layer.parameters(), lr=0.05)
        for _ in range(200):
            layer.weight.grad = (layer.weight.detach().float() - target).to(BF16)
            optimizer.step()
        return float((layer.weight.detach().float() - target).abs().mean() / target.abs().mean())

    assert fine_tuned(masters=True) < 0.003
    assert fine_tuned(masters=False) > 0.009


def test_one_float16_layer_in_a_float32_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32).half(), nn.Linear(32, 1)

        def forward(self, x):
            return self.c(self.b(torch.tanh(self.a(x)).half()).float())

    torch.manual_seed(0)
    model = Net()
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(64, 8)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert [p.dtype for p in model.parameters()].count(FP16) == 2
    assert torch.equal(model.b.weight, optimizer.masters[2].half())


def test_a_bfloat16_adapter_on_a_frozen_float16_base():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            nn.init.zeros_(self.up.weight)
            self.down.to(BF16)
            self.up.to(BF16)

        def forward(self, x):
            return self.base(x.half()).float() + self.up(self.down(x.to(BF16))).float()

    torch.manual_seed(0)
    base = nn.Linear(16, 16).half()
    frozen = copy.deepcopy(base.state_dict())
    model = Adapted(base)
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=2e-2)
    x = torch.randn(128, 16)
    y = base(x.half()).float() + x[:, :1] @ torch.ones(1, 16) * 0.3
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]
    assert all(torch.equal(v, frozen[k]) for k, v in base.state_dict().items())
    assert {p.shape for p in optimizer.state} == {(4, 16), (16, 4)}  # the base costs nothing


# half_model


def test_norms_stay_in_float32_and_everything_else_is_converted():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4), nn.RMSNorm(4)
    )
    assert half_model(model, BF16) is model
    kinds = {name: p.dtype for name, p in [*model.named_parameters(), *model.named_buffers()]}
    assert {k for k, d in kinds.items() if d is BF16} == {
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
    }
    assert kinds["1.running_mean"] is FP32
    assert kinds["1.num_batches_tracked"] is torch.int64
    out = model(torch.randn(2, 3, 8, 8))
    assert out.dtype is FP32
    out.sum().backward()
    assert model[0].weight.grad.dtype is BF16
    assert model[1].weight.grad.dtype is FP32


def test_a_predicate_keeps_what_it_names_and_all_inside_and_all_that_is_tied_to_it():
    model = half_model(GPT(), keep_fp32=lambda m: isinstance(m, (nn.Embedding, Block)))
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert kinds["embed.weight"] is FP32
    assert model.head.weight is model.embed.weight  # tied: so the head is kept too
    assert kinds["blocks.0.qkv.weight"] is FP32
    assert kinds["norm.weight"] is FP16
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()

    nothing = half_model(GPT(), keep_fp32=lambda m: False)
    assert {p.dtype for p in nothing.parameters()} == {FP16}
    everything = half_model(GPT(), keep_fp32=lambda m: True)
    assert {p.dtype for p in everything.parameters()} == {FP32}
    assert everything(torch.zeros(1, 4, dtype=torch.int64)).dtype is FP32


def test_inputs_and_outputs_in_containers_are_converted():
    Out = collections.namedtuple("Out", "a b")

    @dataclasses.dataclass
    class Record:
        x: torch.Tensor

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, pair, *, scale, flag=None):
            assert pair[0].dtype is scale["by"].dtype is FP16
            assert pair[1].dtype is torch.int64
            y = self.layer(pair[0]) * scale["by"]
            return Out(y, [{"y": y, "n": 3}]), Record(y)

    model = half_model(Odd())
    inputs = (torch.ones(1, 2), torch.ones(1, dtype=torch.int64))
    out, record = model(inputs, scale={"by": torch.ones(())})
    assert isinstance(out, Out)
    assert out.a.dtype is out.b[0]["y"].dtype is FP32
    assert out.b[0]["n"] == 3
    assert record.x.dtype is FP32


def test_a_converted_model_is_copied_and_saved_like_any_other(tmp_path):
    model = half_model(GPT())
    twin = copy.deepcopy(model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.equal(model(tokens), twin(tokens))
    assert torch.equal(model(tokens), pickle.loads(pickle.dumps(model))(tokens))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert {p.dtype for p in twin.parameters()} == {FP16, FP32}


def test_only_16_bit_formats():
    with pytest.raises(SettingsError, match=r"float32.*float16 or torch\.bfloat16"):
        half_model(nn.Linear(2, 2), FP32)
