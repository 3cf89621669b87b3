"""Every spelling of a multiply by a constant weight, against the dense model."""

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from pruned import sparse_weight
from torch import nn

import fxsparse

#: name -> (shape of the weight, forward(self, x) with x of (5, 64))
SPELLINGS = {
    "F.linear": ((48, 64), lambda self, x: F.linear(x, self.w)),
    "F.linear with bias": ((48, 64), lambda self, x: F.linear(x, self.w, self.b)),
    "F.linear by keywords": (
        (48, 64),
        lambda self, x: F.linear(bias=self.b, weight=self.w, input=x),
    ),
    "F.linear, bias=None": ((48, 64), lambda self, x: F.linear(x, weight=self.w, bias=None)),
    "torch._C._nn.linear": ((48, 64), lambda self, x: torch._C._nn.linear(x, self.w)),
    "F.linear of w.t()": ((64, 48), lambda self, x: F.linear(x, self.w.t(), self.b)),
    "x @ w": ((64, 48), lambda self, x: x @ self.w),
    "x @ w.t()": ((48, 64), lambda self, x: x @ self.w.t()),
    "x @ w.T": ((48, 64), lambda self, x: x @ self.w.T),
    "x @ w.mT": ((48, 64), lambda self, x: x @ self.w.mT),
    "x @ w.transpose": ((48, 64), lambda self, x: x @ self.w.transpose(0, 1)),
    "x @ w.transpose(-1, -2)": ((48, 64), lambda self, x: x @ self.w.transpose(-1, -2)),
    "x @ w.permute": ((48, 64), lambda self, x: x @ self.w.permute(1, 0)),
    "x @ w.t().contiguous()": ((48, 64), lambda self, x: x @ self.w.t().contiguous()),
    "x @ w.t().t()": ((64, 48), lambda self, x: x @ self.w.t().t()),
    "torch.matmul": ((64, 48), lambda self, x: torch.matmul(x, self.w)),
    "torch.matmul, other=": ((64, 48), lambda self, x: torch.matmul(x, other=self.w)),
    "x.matmul": ((64, 48), lambda self, x: x.matmul(self.w)),
    "torch.mm": ((64, 48), lambda self, x: torch.mm(x, self.w)),
    "torch.mm of torch.t": ((48, 64), lambda self, x: torch.mm(x, torch.t(self.w))),
    "x.mm": ((64, 48), lambda self, x: x.mm(self.w)),
    "torch.addmm": ((64, 48), lambda self, x: torch.addmm(self.b, x, self.w)),
    "torch.addmm of a matrix": ((64, 64), lambda self, x: torch.addmm(x, x, self.w)),
    "torch.addmm, beta=1": ((64, 48), lambda self, x: torch.addmm(self.b, x, self.w, beta=1)),
    "b.addmm": ((48, 64), lambda self, x: self.b.addmm(x, self.w.t())),
    "matmul of 3-D": ((64, 48), lambda self, x: x.view(5, 1, 64) @ self.w),
    "matmul of 1-D": ((64, 48), lambda self, x: x.sum(0) @ self.w),
    "detached": ((48, 64), lambda self, x: F.linear(x, self.w.detach())),
    "used twice": ((64, 64), lambda self, x: F.linear(F.linear(x, self.w).relu(), self.w, None)),
    "dtype read": ((48, 64), lambda self, x: F.linear(x.to(self.w.dtype), self.w)),
}
#: Multiplies that stay nodes of their own: the weight's stand-in makes them calls of the operator.
BY_STAND_IN = {
    "w @ x": ((48, 5), lambda self, x: self.w @ x),
    "addmm with alpha": ((64, 48), lambda self, x: torch.addmm(self.b, x, self.w, alpha=2)),
    "einsum": ((48, 64), lambda self, x: torch.einsum("bk,nk->bn", x, self.w)),
    "einsum, x @ w": ((64, 48), lambda self, x: torch.einsum("kn,bk->nb", self.w, x)),
    "tensordot": ((64, 48), lambda self, x: torch.tensordot(x, self.w, dims=1)),
    "cast to its own dtype": ((48, 64), lambda self, x: F.linear(x, self.w.type(torch.float32))),
    "cast by to and float": ((48, 64), lambda self, x: F.linear(x, self.w.to(x.dtype).float())),
    "inner": ((48, 64), lambda self, x: torch.inner(x, self.w)),
    "mv": ((48, 64), lambda self, x: torch.mv(self.w, x.sum(0))),
    "embedding": ((64, 48), lambda self, x: F.embedding(x.argmax(-1), self.w) @ self.w.t()),
    "bmm": ((3, 64, 48), lambda self, x: torch.bmm(x.expand(3, 5, 64), self.w)),
    "bmm of the transpose": (
        (3, 48, 64),
        lambda self, x: torch.bmm(x.expand(3, 5, 64), self.w.transpose(1, 2)),
    ),
    "one of three": ((3, 48, 64), lambda self, x: F.linear(x, self.w[1]) + F.linear(x, self.w[2])),
    "one of three, transposed": ((3, 64, 48), lambda self, x: x @ self.w[1]),
    "einsum of three": ((3, 48, 64), lambda self, x: torch.einsum("bk,enk->ben", x, self.w)),
}

#: Multiplies that are not rewritten: they stay as they are, and the report says why.
KEPT = {
    "multiplied and read": (
        (64, 64),
        lambda self, x: F.linear(x, self.w) * self.w.sum(),
        "also read by",
    ),
    "both ways": (
        (64, 64),
        lambda self, x: F.linear(x, self.w) @ self.w,
        "as it is and transposed",
    ),
    "its own x": ((64, 64), lambda self, x: F.linear(self.w, self.w) + x.sum(), "also read by"),
}


class Spelled(nn.Module):
    def __init__(self, shape, forward, buffer=False):
        super().__init__()
        weight = sparse_weight(math.prod(shape[:-1]), shape[-1]).view(shape)
        if buffer:
            self.register_buffer("w", weight)
        else:
            self.w = nn.Parameter(weight)
        self.b = nn.Parameter(torch.randn(48))
        self.spelled = forward

    def forward(self, x):
        return self.spelled(self, x)


@pytest.mark.parametrize("buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_rewritten(name, buffer):
    shape, forward = SPELLINGS[name]
    model = Spelled(shape, forward, buffer)
    sparse = fxsparse.compile(model, min_elements=0, capture="trace")
    assert [row.status for row in sparse.report.rows if row.path == "w"] == ["sparse"]
    x = torch.randn(5, 64)
    torch.testing.assert_close(sparse(x), model(x))
    nodes = [str(node.target) for node in sparse.graph.nodes]
    assert not {"w", "t", "T", "transpose", "contiguous"} & set(nodes)
    dense = fxsparse.to_dense(sparse)
    assert dense.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(dense.w, model.w) and isinstance(dense.w, nn.Parameter) is not buffer
    torch.testing.assert_close(dense(x), model(x))


@pytest.mark.parametrize("name", BY_STAND_IN)
def test_other_spellings_run_by_the_stand_in(name, monkeypatch):
    shape, forward = BY_STAND_IN[name]
    model = Spelled(shape, forward)
    sparse = fxsparse.compile(model, min_elements=0, capture="trace")
    assert [row.status for row in sparse.report.rows if row.path == "w"] == ["sparse"]
    x = torch.randn(5, 64)
    expected = model(x)
    with monkeypatch.context() as patch:
        patch.setattr("fxsparse.stand_in.weight_view.unpack", None)  # no dense weight is rebuilt
        torch.testing.assert_close(sparse(x), expected)
    dense = fxsparse.to_dense(sparse)
    assert torch.equal(dense.w, model.w)
    torch.testing.assert_close(dense(x), expected)
    model.spelled = sparse.meta = None  # lambdas cannot be pickled
    torch.testing.assert_close(pickle.loads(pickle.dumps(sparse))(x), expected)


@pytest.mark.parametrize("name", KEPT)
def test_other_multiplies_stay_with_a_reason(name):
    shape, forward, reason = KEPT[name]
    model = Spelled(shape, forward)
    with pytest.warns(fxsparse.NothingRewrittenWarning):
        kept = fxsparse.compile(model, min_elements=0)
    row = next(row for row in kept.report.rows if row.path == "w")
    assert row.status == "dense" and (reason in row.reason or reason == "forward")


def test_a_square_weight_is_not_taken_for_its_transpose():
    for name in ("x @ w", "x @ w.t()", "F.linear"):
        model = Spelled((64, 64), SPELLINGS[name][1])
        sparse = fxsparse.compile(model, min_elements=0)
        x = torch.randn(5, 64)
        torch.testing.assert_close(sparse(x), model(x))


def test_a_linear_called_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            return self.fc(input=x)

    model = Keyword()
    model.fc.weight = nn.Parameter(sparse_weight(64, 64))
    sparse = fxsparse.compile(model, min_elements=0)
    assert sparse.report.rewritten == 1
    x = torch.randn(5, 64)
    torch.testing.assert_close(sparse(x), model(x))


def test_a_buffer_that_is_not_persistent_stays_so():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", sparse_weight(64, 64), persistent=False)

        def forward(self, x):
            return x @ self.w

    model = Fixed()
    sparse = fxsparse.compile(model, min_elements=0)
    assert sparse.report.rewritten == 1
    assert not sparse.state_dict() and not fxsparse.to_dense(sparse).state_dict()
