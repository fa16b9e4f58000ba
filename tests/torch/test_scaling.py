"""The scale on its way: into the loss, out of the gradients, and where it goes next."""

import pytest
import torch
from helpers.torch import X, both_paths, good, half_loss, made, net, train, value

from gradlift.torch import GradScaler


def test_an_initial_scale_of_2_to_the_minus_130():
    with pytest.warns(UserWarning, match="outside"):
        scaler = GradScaler("cpu", init_scale=2.0**-130)
    model = net(8, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train(scaler, model, optimizer, [good] * 20)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_every_16th_loss_is_4096_times_larger():
    model = net(8, 16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=20)
    losses = [(lambda m, i=i: half_loss(m, X, 4096.0 if i % 16 == 15 else 1.0)) for i in range(200)]
    first = value(model)
    results = train(scaler, model, optimizer, losses, max_norm=1.0)
    skipped = [i for i, r in enumerate(results) if not r.stepped]
    assert skipped
    assert all(i % 16 == 15 or results[i].scale > 2**14 for i in skipped)
    assert value(model) < first / 10


def test_a_float16_loss_of_shape_1():
    """The scale is cast to float16 in backward: 2^15 is the most that arrives."""
    w = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([w], lr=1.0), GradScaler("cpu")
    loss = (w * 2.0).half()
    scaled = scaler.scale(loss)
    assert scaled.dtype is torch.float32
    assert scaled.item() == 2.0 * 2**15
    scaled.backward()
    assert w.grad.item() == 2.0 * 2**15
    scaler.step(optimizer)
    assert w.item() == -1.0
    assert "loss computed in float16" in scaler.result.notes[0]
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    plain = torch.ones((1,), dtype=torch.float16, requires_grad=True)
    (plain * torch.tensor(2.0**16)).backward(torch.ones(1, dtype=torch.float16))
    assert plain.grad.isinf().all()  # what torch's scaler would have done


def test_a_float16_loss_of_2_becomes_131072_where_its_scale_allows():
    scaler = GradScaler("cpu", init_scale=2.0**15)
    assert scaler.scale(torch.full((1,), 4.0, dtype=torch.float16)).item() == 131072.0


def test_cuda_without_cuda_is_disabled_as_torchs_is():
    if torch.cuda.is_available():
        assert GradScaler("cuda").is_enabled()
        return
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler("cuda")
    loss = torch.tensor(1.0)
    assert scaler.scale(loss) is loss
    assert scaler.state_dict() == {}


@both_paths
def test_a_vector_loss_in_float16_is_judged_by_its_elements(device_path):
    w, optimizer, scaler = made(device_path)
    losses = torch.full((2000,), 100.0, dtype=torch.float16) + w.half()
    scaler.scale(losses).float().mean().backward()
    scaler.step(optimizer)
    assert scaler.result.stepped
