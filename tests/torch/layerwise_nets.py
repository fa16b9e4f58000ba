"""Networks of every shape that a lift must leave alone."""

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def linear():
    return nn.Linear(WIDTH, WIDTH)


def mlp():
    return nn.Sequential(linear(), nn.GELU(), nn.Dropout(0.2), linear())


class Net(nn.Module):
    """`block` makes each of three blocks; `forward` is the subclass's."""

    block = staticmethod(mlp)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = linear()


class Chain(Net):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(Net):
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Twice(Net):
    def forward(self, x):
        a, b, c = self.blocks
        return self.head(a(b(a(x))) + c(a(x)))


class Early(Net):
    """The last block reads what the first one read, and what it gave."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x, *, skip, also=None):
            return self.a(x) * torch.sigmoid(self.b(skip[0])) + skip[1]

    def __init__(self):
        super().__init__()
        self.first = linear()
        self.last = Early.Both()

    def forward(self, x):
        x = self.first(x)
        y = self.blocks[0](x)
        z = self.blocks[2](self.blocks[1](y))
        return self.head(self.last(z, skip=[x, y])) + x


class Tied(Net):
    """The embedding is the head's weight, and two blocks share theirs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight
        self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, x):
        x = self.table((x.detach()[:, 0].abs() * 4).long().clamp(max=10))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) + F.linear(x, self.table.weight)


class Checkpointed(Net):
    reentrant = False

    def forward(self, x):
        x = self.head(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedInside(Net):
    class block(nn.Module):
        reentrant = False

        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return x


class ReentrantInside(CheckpointedInside):
    """Recomputed in backward, when the block is long over: the check must say so."""

    class block(CheckpointedInside.block):
        reentrant = True


Pair = namedtuple("Pair", "one two")


@dataclass
class Parts:
    what: str
    tensor: torch.Tensor


class Nested(Net):
    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, given):
            x, pair = given["x"], given["pair"]
            a, b = self.a(x + pair.one), self.b(x * pair.two)
            return {"x": (a, [b]), "pair": Pair(a + b, b), "parts": Parts("p", a * b), "n": 3}

    def forward(self, x):
        given = {"x": self.head(x), "pair": Pair(x, x)}
        total = 0.0
        for block in self.blocks:
            out = block(given)
            assert out["n"] == 3
            assert out["parts"].what == "p"
            total = total + out["parts"].tensor + out["x"][1][0]
            given = {"x": out["x"][0], "pair": out["pair"]}
        return {"total": total, "rest": list(out["pair"])}


class WrittenAfter(Net):
    block = staticmethod(linear)

    def forward(self, x):
        a = self.blocks[0](x)
        a.relu_()
        b = self.blocks[1](a)
        b += a
        b.mul_(0.5)
        return self.head(self.blocks[2](b))


class WrittenFirst(Net):
    """A block's first layer writes to its input, which others read afterwards."""

    def block(self):
        return nn.Sequential(nn.ReLU(inplace=True), linear(), nn.GELU(), linear())

    def forward(self, x):
        x = self.head(x)
        y = self.blocks[0](x)
        z = y + x  # x is what the block left there
        part = z[:, :4]
        half = nn.functional.pad(part, (0, 4))
        w = self.blocks[1](half) + half
        return self.blocks[2](w.view(-1, WIDTH)) + w


class Recurrent(Net):
    def block(self):
        return nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        x = x[:, None].expand(-1, 5, -1)
        state = None
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(x)


class Normed(Residual):
    def block(self):
        return nn.Sequential(nn.BatchNorm1d(WIDTH), linear(), nn.LayerNorm(WIDTH), nn.ReLU())


class HandedThrough(Net):
    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, x):
            return x, self.a(x), self.a.weight

    def forward(self, x):
        total = 0.0
        x = self.head(x)
        for block in self.blocks:
            same, y, weight = block(x)
            total = total + y + F.linear(same, weight)
            x = x + y
            again, _, _ = block(x)
            again.tanh_()  # written to, so x is
            x = x * 2
        return total + x


class Attention(Residual):
    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            x = self.norm(x)[None]
            return self.attention(x, x, x)[0][0]


class Borrowing(Net):
    """A block that calls another one, which it does not own."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()
            self.friend = []

        def forward(self, x):
            y = self.a(x)
            return y + self.friend[0](y) if self.friend else y

    def __init__(self):
        super().__init__()
        self.blocks[0].friend.append(self.blocks[1])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Recursive(Net):
    """A block that calls itself."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, x, depth=2):
            return torch.tanh(self.a(self(x, depth - 1) if depth else x))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Loose(Chain):
    """A weight of its own, outside of every block, reached by a list."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.gains = [self.gain]

    def forward(self, x):
        return super().forward(x * self.gains[0]) * self.gain


SOUND = {
    net.__name__: net
    for net in (
        Chain,
        Residual,
        Twice,
        Early,
        Tied,
        Checkpointed,
        Reentrant,
        CheckpointedInside,
        Nested,
        WrittenAfter,
        WrittenFirst,
        Recurrent,
        Normed,
        HandedThrough,
        Attention,
        Borrowing,
        Recursive,
        Loose,
    )
}


# What cannot be right: the check must find it.


class Kept(Net):
    """A block keeps a tensor that the model takes from it."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, x):
            y = self.a(x)
            self.kept = y
            return y

    def forward(self, x):
        total = 0.0
        for block in self.blocks:
            x = block(x)
            total = total + block.kept
            block.kept = None
        return self.head(x) + total


class SideDoor(Net):
    """A tensor leaves in an object that nobody can look into."""

    class Box:
        pass

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, x, box):
            y = self.a(x)
            box.tensor = y
            return y

    def forward(self, x):
        box, total = SideDoor.Box(), 0.0
        for block in self.blocks:
            x = block(x, box)
            total = total + 1e-3 * box.tensor
        return self.head(x) + total


class Hidden(Net):
    """A weight that the block reaches by a list of its own."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()
            self.weights = [self.a.weight]

        def forward(self, x):
            return self.a(x) + F.linear(x, self.weights[0])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


WRONG = {net.__name__: net for net in (Kept, SideDoor, Hidden, ReentrantInside)}
