"""Public reports of weights that several modules share: each is packed once and stays shared.

A test is named for the behaviour and cites the report.
"""

import pytest
import torch
from awkward_models import Tied
from pruned import prune
from torch import nn

import fxsparse


class Shared(nn.Module):
    """Three modules with one weight; the second is called twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.c.weight = self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()) + self.b(x))


def _bytes(module):
    tensors = [*module.parameters(), *module.buffers()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_an_embedding_and_its_head_are_one_packed_weight(capture):
    """https://github.com/huggingface/optimum/pull/1326"""
    model = prune(Tied())
    ids = torch.randint(0, 100, (2, 5))
    compiled = fxsparse.compile(model, min_elements=0, capture=capture)
    torch.testing.assert_close(compiled(ids), model(ids))
    row = next(row for row in compiled.report.rows if row.path == "emb.weight")
    assert row.status == "sparse" and row.aliases == ("head.weight",)
    assert _bytes(compiled) == compiled.report.stored_bytes < _bytes(model) / 2


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_a_tied_model_never_grows(sparsity):
    """https://github.com/huggingface/optimum/pull/1326"""
    model = prune(Tied(), 0.9)
    with torch.no_grad():
        model.emb.weight.copy_(prune(nn.Embedding(100, 64), sparsity).weight)
    compiled = fxsparse.compile(model, min_elements=0)
    ids = torch.randint(0, 100, (2, 5))
    torch.testing.assert_close(compiled(ids), model(ids))
    row = next(row for row in compiled.report.rows if row.path == "emb.weight")
    assert row.status == ("sparse" if sparsity else "dense")
    assert _bytes(compiled) == compiled.report.stored_bytes < _bytes(model)


@pytest.mark.parametrize("inplace", [False, True])
def test_three_modules_with_one_weight_share_one_packed_copy(inplace):
    """https://github.com/tsingmicro-toolchain/OnnxSlim/issues/28"""
    model = prune(Shared())
    x = torch.randn(3, 64)
    expected = model(x)
    for capture in ("modules", "trace"):
        compiled = fxsparse.compile(
            prune(Shared()) if inplace else model,
            min_elements=0,
            capture=capture,
            inplace=inplace,
        )
        assert compiled.a.weight_packed is compiled.b.weight_packed is compiled.c.weight_packed
        assert compiled.report.stored_bytes == _bytes(compiled)
        biases = 3 * 64 * 4
        assert _bytes(compiled) == compiled.a.weight_packed.numel() + biases
        if not inplace:
            torch.testing.assert_close(compiled(x), expected)


def test_a_linear_that_is_called_twice_is_packed_once_and_both_calls_rewritten():
    """https://github.com/OAID/Tengine/issues/1117"""

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Linear(64, 32)

        def forward(self, left, right):
            return self.tower(left) - self.tower(right)

    model = prune(Siamese())
    compiled = fxsparse.compile(model, min_elements=0)
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(compiled(*x), model(*x))
    (row,) = compiled.report.rows
    assert row.status == "sparse" and row.dense_bytes == 64 * 32 * 4
    nodes = [node for node in compiled.graph.nodes if node.op == "call_function"]
    calls = [node for node in nodes if node.target is torch.ops.fxsparse.linear.default]
    assert len(calls) == 2
    assert compiled.report.stored_bytes == _bytes(compiled)


@pytest.mark.parametrize("cls, arguments", [(Tied, "ids"), (Shared, "x")])
def test_compile_leaves_the_original_tied_and_trainable(cls, arguments):
    """https://github.com/tensorflow/model-optimization/issues/994"""
    model = prune(cls())
    x = torch.randint(0, 100, (2, 5)) if arguments == "ids" else torch.randn(3, 64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled = fxsparse.compile(model, min_elements=0)
    dense = fxsparse.to_dense(compiled)
    for same in (model, dense):
        shared = (same.emb, same.head) if cls is Tied else (same.a, same.b, same.c)
        assert len({id(module.weight) for module in shared}) == 1
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    torch.testing.assert_close(compiled(x), model(x))


def test_a_weight_that_one_of_its_uses_needs_dense_stays_for_all_of_them():
    """https://github.com/neuralmagic/sparseml/pull/423"""

    class Regularised(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.other(self.fc(x)), self.fc.weight.square().sum()

    model = prune(Regularised())
    for capture in ("trace", "modules"):
        compiled = fxsparse.compile(model, min_elements=0, capture=capture)
        x = torch.randn(3, 64)
        torch.testing.assert_close(compiled(x), model(x))
        rows = {row.path: row for row in compiled.report.rows}
        assert rows["other.weight"].status == "sparse"
        if capture == "trace":  # a graph shows every use of a weight
            assert rows["fc.weight"].status == "dense"
            assert "also read by" in rows["fc.weight"].reason


def test_a_module_under_two_names_is_one_weight_with_both():
    """https://github.com/IntelLabs/distiller/pull/239"""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.blocks = nn.ModuleList([nn.Linear(64, 64), self.first])

        def forward(self, x):
            for block in self.blocks:
                x = block(x).relu()
            return self.first(x)

    model = prune(Twice())
    for capture in ("trace", "modules"):
        compiled = fxsparse.compile(model, min_elements=0, capture=capture)
        x = torch.randn(3, 64)
        torch.testing.assert_close(compiled(x), model(x))
        rows = {row.path: row for row in compiled.report.rows}
        assert list(rows) == ["first.weight", "blocks.0.weight"]
        assert rows["first.weight"].aliases == ("blocks.1.weight",)
        assert compiled.report.rewritten == 2
        assert compiled.report.stored_bytes == _bytes(compiled)
    assert compiled.blocks[1] is compiled.first
