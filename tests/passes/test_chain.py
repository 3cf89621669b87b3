"""The two multiplies of a feed-forward layer become one call."""

import pytest
import torch
import torch.nn.functional as F
from fusing import calls, fused, same, same_values
from fxsparse.passes.chain import Chain
from torch import nn

import fxsparse


class Layer(nn.Module):
    """``between`` is given the module, x and a linear of x; what it gives back is multiplied again."""

    def __init__(self, between, hidden=96, bias=True):
        super().__init__()
        self.up, self.gate = nn.Linear(64, hidden, bias), nn.Linear(64, hidden, bias)
        self.down, self.between = nn.Linear(hidden, 64, bias), between
        self.act, self.drop, self.same = nn.GELU(), nn.Dropout(0), nn.Identity()
        self.wide = nn.Linear(64, hidden)

    def forward(self, x):
        return self.down(self.between(self, x, self.up(x)))


CHAINED = {
    "a function": (lambda m, x, y: F.gelu(y), "gelu"),
    "a module": (lambda m, x, y: m.act(y), "gelu"),
    "in place": (lambda m, x, y: y.relu_(), "relu"),
    "nothing between but what does nothing": (lambda m, x, y: m.same(m.drop(m.act(y))), "gelu"),
    "a gate": (lambda m, x, y: F.silu(m.gate(x)) * y, "silu"),
    "a gate on the right": (lambda m, x, y: y * F.gelu(m.gate(x)), "gelu"),
    "a gate that is written to": (lambda m, x, y: F.relu(m.gate(x), inplace=True).mul_(y), "relu"),
    "dropouts in a gate": (lambda m, x, y: m.drop(m.act(m.gate(x)) * m.drop(y)), "gelu"),
}


@pytest.mark.parametrize("name", CHAINED)
@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("bias", [True, False])
def test_one_call(name, capture, bias):
    between, epilogue = CHAINED[name]
    model, x = Layer(between, bias=bias), torch.randn(2, 5, 64)
    sparse = fused(model, Chain, example_inputs=(x,), capture=capture)
    assert calls(sparse) == [f"mlp {epilogue}"]
    same(sparse, model, x)
    same(sparse, model, torch.randn(3, 40, 64))
    assert torch.equal(fxsparse.to_dense(sparse)(x), model(x))


LEFT = {
    "no activation": lambda m, x, y: y,
    "another use": lambda m, x, y: F.gelu(y) + y.sum(),
    "another use of what is activated": lambda m, x, y: (a := F.gelu(y)) * a.sum(),
    "a square": lambda m, x, y: (a := F.relu(y)) * a,
    "a gate of another input": lambda m, x, y: F.silu(m.gate(x.exp())) * y,
    "a gate by itself": lambda m, x, y: m.gate(x) * y,
    "an activation that is not known": lambda m, x, y: F.elu(y),
    "a norm": lambda m, x, y: F.gelu(F.normalize(y)),
    "a gate of another width": lambda m, x, y: F.silu(m.gate(x)[..., :1]) * y,
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name):
    model = Layer(LEFT[name])
    sparse = fused(model, Chain)
    assert "linear" in calls(sparse) and not any("mlp" in call for call in calls(sparse))
    same(sparse, model, torch.randn(5, 64))


def test_what_writes_to_the_input_keeps_the_calls_apart():
    class Written(Layer):
        def forward(self, x):
            x = x * 2
            y = self.up(x)
            x.relu_()
            return self.down(F.silu(self.gate(x)) * y) + self.wide(x).sum()

    model = Written(None)
    sparse = fused(model, Chain)
    assert not any("mlp" in call for call in calls(sparse))
    same(sparse, model, torch.randn(5, 64))


def test_caps_on_threads_of_the_user_win():
    model = Layer(CHAINED["a gate"][0])
    threads = {"up.weight": 1, "gate.weight": 1, "down.weight": 1}
    assert calls(fused(model, Chain, threads=threads)) == ["mlp silu"]
    apart = fused(model, Chain, threads=threads | {"down.weight": 2})
    assert "mlp silu" not in calls(apart)
    assert [row.threads for row in apart.report.rows] == [1, 1, 2, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["a function", "a gate"])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_values(dtype, name, rows):
    model = Layer(CHAINED[name][0]).to(dtype)
    same_values(fused(model, Chain), model, rows, dtype, 2e-2)


def test_gradients_and_autocast():
    model = Layer(CHAINED["a gate"][0])
    sparse, x = fused(model, Chain), torch.randn(5, 64, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, model.up.bias, model.down.bias])
    got = torch.autograd.grad(sparse(x).sum(), [x, sparse.up.bias, sparse.down.bias])
    torch.testing.assert_close(got, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        same(sparse, model, x, rtol=2e-2, atol=2e-2)
