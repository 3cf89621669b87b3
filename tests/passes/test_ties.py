"""Tied and shared weights are judged and counted once, and stay tied."""

import pytest
import torch
from awkward_models import Tied
from pruned import prune, sparse_weight
from torch import nn

import fxsparse


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x):
        return self.a(x) + self.b(x * 2) + self.again(x * 3)


def _bytes(module):
    tensors = [*module.parameters(), *module.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("capture", ["trace", "modules"])
@pytest.mark.parametrize("inplace", [False, True])
def test_an_embedding_tied_to_its_head_is_packed_once(capture, inplace):
    model = prune(Tied())
    ids = torch.randint(0, 100, (2, 5))
    expected, before = model(ids), _bytes(model)
    sparse = fxsparse.compile(model, min_elements=0, capture=capture, inplace=inplace)
    rows = {row.path: row for row in sparse.report.rows}
    assert list(rows) == ["emb.weight", "body.weight"]
    assert rows["emb.weight"].aliases == ("head.weight",)
    assert rows["emb.weight"].status == rows["body.weight"].status == "sparse"
    assert sparse.emb.weight_packed is sparse.head.weight_packed
    assert (_bytes(sparse), before) == (sparse.report.stored_bytes, sparse.report.dense_bytes)
    torch.testing.assert_close(sparse(ids), expected)


@pytest.mark.parametrize("capture", ["trace", "modules"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_weight_shared_by_linears_is_packed_once(capture, inplace):
    model = prune(Siamese())
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, capture=capture, inplace=inplace)
    (row,) = sparse.report.rows
    assert row.status == "sparse" and set(row.aliases) >= {"b.weight"}
    assert sparse.report.stored_bytes == _bytes(sparse)
    assert sparse.a.weight_packed is sparse.b.weight_packed
    torch.testing.assert_close(sparse(x), expected)
    dense = fxsparse.to_dense(sparse)
    assert dense.a.weight is dense.b.weight
    torch.testing.assert_close(dense(x), expected)


def test_the_original_stays_tied_and_trainable():
    model = prune(Siamese())
    fxsparse.compile(model, min_elements=0)
    assert model.b.weight is model.a.weight and type(model.a) is nn.Linear
    model(torch.randn(3, 64)).sum().backward()
    assert model.a.weight.grad is not None


def test_views_of_one_memory_stay_dense():
    big = sparse_weight(128, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    model[0].weight = nn.Parameter(big[:64])
    model[1].weight = nn.Parameter(big[64:])
    with pytest.warns(fxsparse.NothingRewrittenWarning):
        report = fxsparse.compile(model, min_elements=0).report
    assert "shares its memory" in report.rows[0].reason


def test_conflicting_thread_patterns_on_one_weight_warn():
    model = prune(Siamese())
    with pytest.warns(UserWarning, match=r"different numbers \[1, 2\]"):
        sparse = fxsparse.compile(model, min_elements=0, threads={"a.*": 1, "b.*": 2})
    assert sparse.report.rows[0].threads == 1
