"""Multiplies of one input become one call."""

import pytest
import torch
import torch.nn.functional as F
from fusing import calls, fused, same, same_values
from fxsparse.passes.siblings import Siblings, data_flow
from torch import fx, nn

import fxsparse
from fxsparse import ops


class Several(nn.Module):
    """``use`` is given the module and x."""

    def __init__(self, use):
        super().__init__()
        self.a, self.b = nn.Linear(64, 96), nn.Linear(64, 32, bias=False)
        self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 64)
        self.use = use

    def forward(self, x):
        return self.use(self, x)


JOINED = {
    "at once": (lambda m, x: (m.a(x), m.b(x), m.c(x)), [3]),
    "far apart": (lambda m, x: (m.a(x).softmax(-1), m.b(x).exp(), m.c(x).sum()), [3]),
    "one after the other's result": (lambda m, x: m.c(x) + m.d(m.c(x)) + m.d(x), [3]),
    "of two inputs": (lambda m, x: (m.a(x), m.b(x.exp()), m.c(x), m.d(x.exp())), [2]),
    "of two inputs that are one": (lambda m, x: (e := x.exp(), m.a(x), m.b(e), m.c(x), m.d(e)), [2, 2]),
    "views that are alike": (lambda m, x: (m.a(x.view(-1, 64)), m.b(x.view(-1, 64))), [2]),
    "with an activation": (lambda m, x: (F.relu_(m.a(x)), m.b(x.exp())), []),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("capture", ["trace", "export"])
def test_joined(name, capture):
    use, expected = JOINED[name]
    model, x = Several(use), torch.randn(6, 64)
    sparse = fused(model, Siblings, example_inputs=(x,), capture=capture)
    nodes = sparse.graph.find_nodes(op="call_function", target=ops.linears)
    assert [len(node.args[1]) for node in nodes] == expected
    same(sparse, model, x)
    dense = fxsparse.to_dense(sparse)
    same(dense, model, x, rtol=0, atol=0)
    assert set(dense.state_dict()) == set(model.state_dict())


def test_what_writes_to_the_input_keeps_them_apart():
    def use(m, x):
        x = x * 2
        first = m.a(x), m.b(x)
        x.relu_()
        return *first, m.c(x), m.d(x)

    model = Several(use)
    sparse = fused(model, Siblings)
    assert calls(sparse).count("linears") == 2
    same(sparse, model, torch.randn(5, 64))


def test_a_view_from_before_a_write_is_another_input():
    def use(m, x):
        x = x * 2
        copy = x.t().reshape(-1, 64)
        x.relu_()
        return m.a(copy), m.b(x.t().reshape(-1, 64))

    model = Several(use)
    sparse = fused(model, Siblings)
    assert "linears" not in calls(sparse)
    same(sparse, model, torch.randn(64, 64))


def test_a_view_in_place_changes_the_input_of_the_next():
    model = Several(lambda m, x: (m.a(x.unsqueeze_(0)), m.b(x.unsqueeze(0))))
    sparse = fused(model, Siblings)
    assert "linears" not in calls(sparse)
    x = torch.randn(5, 64)
    torch.testing.assert_close(sparse(x.clone()), model(x.clone()))


def test_other_caps_on_threads_and_dtypes_stay_apart():
    model = Several(lambda m, x: (m.a(x), m.b(x), m.c(x)))
    sparse = fused(model, Siblings, threads={"b.weight": 2})
    assert calls(sparse).count("linears") == 1 and calls(sparse).count("linear") == 1
    same(sparse, model, torch.randn(5, 64))


def test_a_bias_that_an_earlier_multiply_uses_stays_before_it():
    model = Several(lambda m, x: (m.c(x.exp()), m.a(x), m.d(x)))
    model.d.bias = model.c.bias
    sparse = fused(model, Siblings)
    assert calls(sparse).count("linears") == 1
    sparse.graph.lint()
    same(sparse, model, torch.randn(5, 64))


def test_the_graph_of_networkx_has_an_edge_to_each_use():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("exp", (x,))
    z = graph.call_function(torch.add, (x, y))
    assert set(data_flow(graph).edges) == {(x, y), (x, z), (y, z)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_values(dtype, rows):
    model = Several(lambda m, x: (m.a(x), m.b(x), m.c(x))).to(dtype)
    same_values(fused(model, Siblings), model, rows, dtype, 1e-2)


def test_gradients_and_autocast():
    model = Several(lambda m, x: (m.a(x), m.b(x)))
    sparse, x = fused(model, Siblings), torch.randn(5, 64, requires_grad=True)
    expected = torch.autograd.grad(sum(y.sum() for y in model(x)), [x, model.a.bias])
    got = torch.autograd.grad(sum(y.sum() for y in sparse(x)), [x, sparse.a.bias])
    torch.testing.assert_close(got, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        same(sparse, model, x, rtol=2e-2, atol=2e-2)
