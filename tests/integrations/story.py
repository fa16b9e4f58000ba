"""One story for every trainer: six batches in float16, of which the third and the fifth overflow.

`plain` is what must come of it: a loop in torch alone that leaves the two out, so that neither
weights nor optimizer nor schedule ever see them.
"""

import torch

SCALE = 2.0**10
RULE = "static:1024"
DYNAMIC = "dynamic:init_scale=2^10"
GROWING = "dynamic:init_scale=2^10,growth_interval=3"
LIMIT = 0.25  # of clipping
_LOUD = 2.0**12  # scaled by this as well, the gradient of the output leaves float16
FACTORS = [1.0, 1.0, _LOUD, 1.0, _LOUD, 1.0]
SKIPPED = [f == _LOUD for f in FACTORS]
LRS = [0.5, 0.25, 0.125, 0.125, 0.0625, 0.0625]  # of each batch: halved by an applied step only
BATCHES = [
    (x, torch.tensor(f))
    for x, f in zip(torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0)), FACTORS)
]


def make_net(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def make_optimizer(net, fused=False):
    return torch.optim.AdamW(net.parameters(), lr=0.5, fused=fused)


def make_schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def parts(fused=False):
    net = make_net()
    optimizer = make_optimizer(net, fused)
    return net, optimizer, make_schedule(optimizer)


def torch_scaler():
    """What trainers have by themselves where there is a GPU."""
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


def loss_of(output, factor):
    return ((output.float() - 4).square() * factor).mean()


def true_gradients(net, batches):
    """Of the mean over these batches, computed in float16 at `SCALE`."""
    net.zero_grad()
    for x, factor in batches:
        with torch.autocast("cpu", torch.float16):
            output = net(x)
        (loss_of(output, factor) / len(batches) * SCALE).backward()
    for p in net.parameters():
        p.grad /= SCALE


def clip_(net, by):
    if by == "norm":
        torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
    elif by == "value":
        torch.nn.utils.clip_grad_value_(net.parameters(), LIMIT)


def plain(windows, fused=False, clip=None):
    """The weights after these windows of batches."""
    net, optimizer, schedule = parts(fused)
    for window in windows:
        true_gradients(net, window)
        clip_(net, clip)
        optimizer.step()
        schedule.step()
    return net


def assert_apart(nets, fused=False, clip=None, exact=True):
    """Two nets of seeds 1 and 2, trained at once without a schedule: only the first was loud."""
    for net, seed in zip(nets, (1, 2)):
        expected = make_net(seed)
        optimizer = make_optimizer(expected, fused)
        for (x, _), bad in zip(BATCHES, SKIPPED):
            if seed == 2 or not bad:
                true_gradients(expected, [(x, 1.0)])
                clip_(expected, clip)
                optimizer.step()
        assert_same(net, expected, exact)


CLEAN = [[batch] for batch, bad in zip(BATCHES, SKIPPED) if not bad]


def assert_same(net, expected, exact=True):
    """`exact` where no norm is taken: torch and gradlift round that one differently."""
    for (name, a), b in zip(net.named_parameters(), expected.parameters(), strict=True):
        if exact:
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
