"""Models whose forward a trace would get wrong, and some that it gets right."""

import enum
import inspect
import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    hidden: torch.Tensor
    scores: torch.Tensor


class Tied(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.body(self.emb(ids)).relu())


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64)


class Plain(Base):
    def forward(self, x):
        return self.b(self.a(x).relu())


class Optional(Base):
    def forward(self, x, mask=None):
        y = self.b(self.a(x))
        return y if mask is None else y * mask


class RequiredButNone(Base):
    def forward(self, x, mask):
        return self.a(x) if mask is None else self.b(x) * mask


class NoneInHelper(Base):
    def forward(self, x, mask):
        return _pick(self, x, mask)


def _pick(self, x, mask):
    return self.a(x) if mask is None else self.b(x)


class IsInstance(Base):
    def forward(self, x):
        return self.a(x) if isinstance(x, torch.Tensor) else self.b(x)


class FunctionalDropout(Base):
    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.5, self.training))


class Autocast(Base):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x)
        return self.b(y.float())


class NoGrad(Base):
    def forward(self, x):
        with torch.no_grad():
            y = self.a(x)
        return self.b(y)


class Kwargs(Base):
    def forward(self, x, **options):
        return self.b(self.a(x)) * options.get("scale", 1.0)


class Counter(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x)) * self.calls


class History(Base):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return self.b(self.a(x))


class Noise(Base):
    def forward(self, x):
        return self.b(self.a(x)) + torch.rand(64)


class BufferInPlace(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps += 1
        return self.b(self.a(x)) * self.steps


class InPlaceAlias(Base):
    def forward(self, x):
        y = self.a(x)
        z = y.view(-1)
        z += 1
        return self.b(y)


class Branch(Base):
    def forward(self, x):
        return self.b(x) if x.sum() > 0 else self.a(x)


class Iterates(Base):
    def forward(self, x):
        return torch.stack([self.a(row) for row in x])


class UnpacksShape(Base):
    def forward(self, x):
        shape = (*x.shape[:-1], 4, 16)
        return self.b(self.a(x).view(shape).flatten(-2))


class Ordered(Base):
    def forward(self, x):
        return OrderedDict(first=self.a(x), second=self.b(x))


class ReturnsDict(Base):
    def forward(self, x):
        return {"first": self.a(x), "rest": [self.b(x), None]}


class ReturnsNamedTuple(Base):
    def forward(self, x):
        return Pair(self.a(x), self.b(x))


class ReturnsDataclass(Base):
    def forward(self, x):
        return Output(self.a(x), self.b(x))


class TensorMethod(Base):
    def forward(self, x):
        return self.b(torch.Tensor.flatten(self.a(x), 1))


class BatchNorm(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class FunctionalBatchNorm(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("var", torch.ones(64))

    def forward(self, x):
        return self.b(F.batch_norm(self.a(x), self.mean, self.var, training=self.training))


class ReadsWeight(Base):
    def forward(self, x):
        return self.b(self.a(x).to(self.b.weight.dtype)) + self.a.weight.shape[0]


class ByStructure(Base):
    """Control flow that depends on nothing but what the model is made of."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.a, self.b])
        self.down = None

    def forward(self, x):
        outputs = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < len(self.layers) - 1:
                x = x.relu()
            outputs.append(x)
        return outputs[-1] if self.down is None else self.down(x)


class InPlaceOnTranspose(Base):
    def forward(self, x):
        y = self.a(x)
        view = y.T
        view += 1
        return self.b(y)


class ScalesSizes(Base):
    """Numbers and tensors updated in place, with other names for them."""

    def forward(self, x):
        n = x.size(-1)
        k = n
        k *= 2
        k -= n + 1
        y = self.a(x)
        z = y
        y /= k
        y += x
        return self.b(y) * n + z


class ListInPlace(Base):
    history = []  # noqa: RUF012

    def forward(self, x):
        seen = self.history
        seen += [x]
        return self.b(self.a(x))


class InPlaceOnSize(Base):
    def forward(self, x):
        n = x.size(-1)
        k = n
        k **= -0.5
        return self.b(self.a(x)) * n * k


class WritesData(Base):
    def forward(self, x):
        y = self.a(x)
        y.data = y.data * 2
        return self.b(y)


class FillsATensor(Base):
    def forward(self, x):
        out = torch.zeros(64)
        out.add_(self.a(x).sum(0))
        return self.b(out)


class Constant(Base):
    def forward(self, x):
        return self.b(self.a(x)) + torch.arange(64)


class LooksAtAlias(Base):
    def forward(self, x, mask):
        m = mask
        if m is None:
            return self.a(x)
        return self.b(x)


class LooksAtPacked(Base):
    def forward(self, x, more):
        kept = [t for t in more if t is not None]
        return self.a(x) * len(kept) + self.b(x)


class IsTensor(Base):
    def forward(self, x):
        return self.a(x) if torch.is_tensor(x) else self.b(x)


class ExactType(Base):
    def forward(self, x):
        return self.a(x) if type(x) is torch.Tensor else self.b(x)


class Identity(Base):
    def forward(self, q, k):
        return self.a(q) if q is k else self.b(k)


class Catches(Base):
    def forward(self, x):
        try:
            n = int(x.shape[0])
        except Exception:
            n = 1
        return self.b(self.a(x)) * n


class Fp32Island(Base):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.b(self.a(x.float()))


class GradMode(Base):
    def forward(self, x):
        return self.a(x) if torch.is_grad_enabled() else self.b(self.a(x))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class ReversesGradient(Base):
    def forward(self, x):
        return self.b(_Reverse.apply(self.a(x)))


class Seeds(Base):
    def forward(self, x):
        torch.manual_seed(0)
        return self.b(self.a(x))


class LayerDrop(Base):
    def forward(self, x):
        x = self.a(x)
        return x if self.training and random.random() < 0.1 else self.b(x)


class KeepsTheNorm(Base):
    def train(self, mode=True):
        return super().train(False)

    def forward(self, x):
        return self.b(self.a(x))


class Cache(Base):
    cache = {}  # noqa: RUF012

    def forward(self, x):
        if "scale" not in self.cache:
            self.cache["scale"] = self.a.bias * 2
        return self.b(x) * self.cache["scale"]


def Closure():
    calls = 0

    class Closure(Base):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return self.b(self.a(x)) * (1 + calls * 0)

    return Closure


class Generates(Base):
    def forward(self, x):
        return self.b(self.a(x))

    def generate(self, x):
        return self(x) + 1


class Form(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


class ArgumentsByStructure(Base):
    """Branches on arguments that are the same at every call, and on an enumeration."""

    def __init__(self):
        super().__init__()
        self.form = Form.DOUBLE
        self.register_buffer("mask", torch.rand(64))

    def forward(self, x):
        return self._mix(self._mix(x, None), self.mask, last=True)

    def _mix(self, x, mask, last=False):
        torch._assert(x.shape[-1] == 64, f"expected 64 values, got {x.shape[-1]}")
        gate = self.a(x).sigmoid() if mask is not None else None
        if self.form is Form.DOUBLE and not torch.jit.is_scripting():
            x = x * 2
        if gate is not None:
            x = x * gate * mask
        return self.b(x) if last else self.a(x)


class PassesOn(Base):
    """Hands an argument of the model on to a method that asks for None."""

    def forward(self, x, mask):
        return self._mix(self._mix(x, None), mask)

    def _mix(self, x, mask):
        return self.a(x) if mask is None else self.b(x) * mask


class HandsOver(Base):
    """Lets a function of Python's library ask what an argument is."""

    def forward(self, x):
        return self._pick(x, inspect.isbuiltin(x) or not inspect.isclass(x))

    def _pick(self, x, flag):
        return self.a(x) if flag else self.b(x)


class ReadsFlagInVain(Base):
    """A rate that is zero in training too."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return self.b(_drop(self.a(x), self.rate, self.training))


def _drop(x, rate, training):
    if rate == 0.0 or not training:
        return x
    return F.dropout(x, rate)


class DropsInTraining(ReadsFlagInVain):
    def __init__(self):
        super().__init__(0.5)


class _Compares(nn.Module):
    def forward(self, x, outer):
        return x if self.training == outer else -x


class FlagsOfTwo(Base):
    """The same in training and evaluation, but not where the flags of its modules differ."""

    def __init__(self):
        super().__init__()
        self.inner = _Compares()

    def forward(self, x):
        return self.inner(self.b(self.a(x)), self.training)


class OwnBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training
        ).relu()


class OwnNorm(Base):
    def __init__(self):
        super().__init__()
        self.norm = OwnBatchNorm(64)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class _Loss(nn.Module):
    loss = 0.0

    def forward(self, x):
        if self.training:
            self.loss = 1.0
        return x


class LeavesALoss(Base):
    """Reads what a submodule left behind in training."""

    def __init__(self):
        super().__init__()
        self.norm = _Loss()

    def forward(self, x):
        return self.b(self.norm(self.a(x))) + self.norm.loss


def _note(module):
    module.loss = 1.0


class _NotedLoss(nn.Module):
    loss = 0.0

    def forward(self, x):
        if self.training:
            _note(self)
        return x


class HandsItselfOn(LeavesALoss):
    def __init__(self):
        super().__init__()
        self.norm = _NotedLoss()


class _WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = _Loss()

    def forward(self, x):
        return self.loss(x) if self.training else x


class ChildLeavesALoss(Base):
    def __init__(self):
        super().__init__()
        self.norm = _WithLoss()

    def forward(self, x):
        return self.b(self.norm(self.a(x))) + self.norm.loss.loss
