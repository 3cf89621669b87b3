"""Rows looked up in packed weights: the operator, the modules, and ties to a head."""

import pytest
import torch
import torch.nn.functional as F
from pruned import prune, sparse_weight
from torch import nn
from torch.library import opcheck

import fxsparse
from fxsparse.cost import FORMATS
from fxsparse.packing import pack

N, K = 100, 48
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_gives_rows_bit_for_bit(format, dtype):
    weight = sparse_weight(N, K, 0.8, dtype)
    weight[7] = 0
    weight[9, :2] = torch.tensor([float("nan"), float("inf")], dtype=dtype)
    packed = pack(weight, format=format)
    for indices in (
        torch.randint(0, N, (3, 5)),
        torch.arange(N).flip(0),
        torch.tensor(9),
        torch.tensor([7, 7, 0, N - 1]),
        torch.empty(0, dtype=torch.long),
        torch.empty(2, 0, 3, dtype=torch.long),
        torch.randint(0, N, (4, 6)).t()[::2],
        torch.tensor([5]).expand(6),
    ):
        got = torch.ops.fxsparse.embedding(indices, packed, N, K, dtype)
        expected = F.embedding(indices, weight)
        assert got.dtype == dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_the_operator_passes_opcheck():
    packed = pack(sparse_weight(N, K), format="csr")
    for indices in (torch.tensor([[1, 2], [3, 99]]), torch.empty(0, dtype=torch.long)):
        opcheck(torch.ops.fxsparse.embedding.default, (indices, packed, N, K, torch.float32))


def test_the_operator_refuses_what_is_wrong():
    packed = pack(sparse_weight(N, K), format="csr")
    for indices in (torch.tensor([N]), torch.tensor([0, -1])):
        with pytest.raises(RuntimeError, match="expected indices from 0 to 99"):
            torch.ops.fxsparse.embedding(indices, packed, N, K, torch.float32)
    with pytest.raises(RuntimeError, match="indices of dtype int64, got int32"):
        torch.ops.fxsparse.embedding(torch.tensor([1]).int(), packed, N, K, torch.float32)
    with pytest.raises(RuntimeError, match="expected"):
        torch.ops.fxsparse.embedding(torch.tensor([1]), packed, N + 1, K, torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ops.fxsparse.embedding(torch.tensor([1]), packed, N, K, torch.float64)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


class Wraps(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids.clamp(0, N - 1), self.weight, self.padding_idx) * 2


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.emb = embedding
        self.head = nn.Linear(K, N, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.emb(ids))


class TiedByHand(Tied):
    def forward(self, ids, scale=None):
        return F.linear(self.emb(ids), self.emb.weight)


KINDS = {
    "plain": lambda: nn.Embedding(N, K),
    "padding_idx": lambda: nn.Embedding(N, K, padding_idx=3),
    "scaled": lambda: Scaled(N, K),
    "own forward": lambda: Wraps(N, K, padding_idx=1),
    "bag": lambda: nn.EmbeddingBag(N, K, mode="sum"),
    "mean bag": lambda: nn.EmbeddingBag(N, K),
}
STAYS = {
    "max_norm": (lambda: nn.Embedding(N, K, max_norm=1.0), "max_norm writes to it"),
    "bag, max_norm": (lambda: nn.EmbeddingBag(N, K, max_norm=1.0), "max_norm writes to it"),
    "bag, padding_idx": (lambda: nn.EmbeddingBag(N, K, padding_idx=1), "padding_idx"),
    "max bag": (lambda: nn.EmbeddingBag(N, K, mode="max"), "mode='max'"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("capture", ["auto", "modules"])
@pytest.mark.parametrize("tied", [Tied, TiedByHand])
def test_tied_to_a_head(name, capture, tied):
    model = prune(tied(KINDS[name]()))
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    (row,) = sparse.report.rows
    assert row.status == "sparse" and row.aliases
    for dtype in (torch.int64, torch.int32):
        ids = torch.randint(0, N, (2, 5), dtype=dtype)
        torch.testing.assert_close(sparse(ids), model(ids))
    dense = fxsparse.to_dense(sparse)
    assert dense.emb.weight is dense.head.weight
    assert torch.equal(dense.emb.weight, model.emb.weight)


@pytest.mark.parametrize("name", STAYS)
@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_both_stay_dense_where_the_look_up_needs_values(name, capture):
    make, reason = STAYS[name]
    model = prune(Tied(make()))
    with pytest.warns(fxsparse.NothingRewrittenWarning):
        report = fxsparse.compile(model, min_elements=0, capture=capture).report
    (row,) = report.rows
    assert row.status == "dense" and reason in row.reason
    assert report.saved_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_an_index_out_of_range_is_an_index_error(dtype, capture):
    model = prune(Tied(nn.Embedding(N, K)).to(dtype))
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    for wrong in (N, -1, 2**40):
        for module in (model, sparse):
            with pytest.raises(IndexError, match="out of range"):
                module(torch.tensor([0, wrong]))
    with pytest.raises(RuntimeError, match="[Ll]ong|[Ii]nt"):
        sparse(torch.tensor([0.0, 1.0]))
    ids = torch.randint(0, N, (2, 5))
    exact = model.double()(ids)
    bound = {2: 1e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    torch.testing.assert_close(sparse(ids).double(), exact, rtol=bound, atol=bound)


def test_untied_is_packed_where_it_is_asked_for():
    model = prune(nn.Sequential(nn.Embedding(N, K), nn.Linear(K, K)))
    ids = torch.randint(0, N, (2, 5))
    assert "0.weight" not in {r.path for r in fxsparse.compile(model, min_elements=0).report.rows}
    sparse = fxsparse.compile(model, min_elements=0, include=["0.weight", "1.weight"])
    assert all(row.status == "sparse" for row in sparse.report.rows)
    torch.testing.assert_close(sparse(ids), model(ids))


def test_gradients_pass_a_tied_head():
    model = prune(Tied(nn.Embedding(N, K)))
    sparse = fxsparse.compile(model, min_elements=0, capture="modules")
    x = torch.randn(2, K, requires_grad=True)
    gradients = [torch.autograd.grad(m.head(x).sum(), x)[0] for m in (model, sparse)]
    torch.testing.assert_close(*gradients)
    assert not sparse(torch.tensor([1])).requires_grad
