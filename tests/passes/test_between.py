"""``more``: a call says so where another one follows and nothing between needs torch's threads."""

import operator

import pytest
import torch
import torch.nn.functional as F
from fxsparse.passes.between import is_brief
from fxsparse.passes.follow import MORE
from pruned import prune
from torch import fx, nn

import fxsparse

#: name -> (what the next linear is given, whether the threads stay awake for it)
BETWEEN = {
    "nothing": (lambda self, x, y: y, True),
    "views": (lambda self, x, y: y.view(2, 4, 64).transpose(0, 1).reshape(-1, 64)[:3], True),
    "an activation": (lambda self, x, y: F.mish(y), True),
    "an activation of torch": (lambda self, x, y: torch.celu(y), True),
    "a method in place": (lambda self, x, y: y.clamp_(min=0), True),
    "a module": (lambda self, x, y: self.act(y), True),
    "a residual": (lambda self, x, y: self.drop(y) + x, True),
    "a scale": (lambda self, x, y: y * self.scale, True),
    "a norm": (lambda self, x, y: self.norm(y), False),
    "a softmax": (lambda self, x, y: y.softmax(-1), False),
    "a dense linear": (lambda self, x, y: self.dense(y), False),
    "a product": (lambda self, x, y: y @ y.t() @ y, False),
    "attention": (
        lambda self, x, y: F.scaled_dot_product_attention(y[None], y[None], y[None])[0],
        False,
    ),
    "a sum": (lambda self, x, y: y - y.sum(), False),
    "an activation, then a norm": (lambda self, x, y: self.norm(self.act(y)), False),
}


class Two(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.dense = nn.Linear(64, 64)
        self.norm, self.act, self.drop = nn.LayerNorm(64), nn.Softplus(), nn.Dropout()
        self.scale = nn.Parameter(torch.rand(64))
        self.between = between

    def forward(self, x):
        return self.second(self.between(self, x, self.first(x)))


def more_of(graph_module):
    return [
        node.args[MORE[node.target]] for node in graph_module.graph.nodes if node.target in MORE
    ]


@pytest.mark.parametrize("name", BETWEEN)
def test_two_linears_with(name):
    between, expected = BETWEEN[name]
    model = prune(Two(between))
    sparse = fxsparse.compile(model, min_elements=0, exclude=["dense.weight"], capture="trace")
    assert more_of(sparse) == [expected, False]
    x = torch.randn(8, 64)
    torch.testing.assert_close(sparse(x), model(x))
    assert "more" not in fxsparse.to_dense(sparse).code


def test_several_of_one_input():
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
            self.out = nn.Linear(64, 64)

        def forward(self, x):
            q, k, v = self.q(x), self.k(x), self.v(x)
            return self.out(F.scaled_dot_product_attention(q, k, v))

    sparse = fxsparse.compile(prune(Projections()), min_elements=0, capture="trace")
    assert more_of(sparse) == [False, False]


def test_exported_operators_and_others():
    graph = fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    expected = {
        graph.call_function(aten.relu.default, (x,)): True,
        graph.call_function(aten.add_.Tensor, (x, x)): True,
        graph.call_function(operator.iadd, (x, x)): True,
        graph.call_function(aten.mm.default, (x, x)): False,
        graph.call_function(max, (x, x)): False,
        graph.call_module("inner", (x,)): False,
        graph.output(x): False,
    }
    module = fx.GraphModule({"inner": Two(None)}, graph)
    assert {node: is_brief(module, node) for node in expected} == expected
