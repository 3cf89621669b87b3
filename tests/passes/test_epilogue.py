"""Activations, residuals and gates move into the call of the multiply that they follow."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from fusing import calls, fused
from fxsparse.passes.chain import Chain
from fxsparse.passes.epilogue import Epilogue
from torch import nn

import fxsparse


class Then(nn.Module):
    """``then`` is given the module, x and the result of a linear of x."""

    def __init__(self, then, features=64, **modules):
        super().__init__()
        self.linear, self.then = nn.Linear(64, features), then
        self.scale = nn.Parameter(torch.rand(features))
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.then(self, x, self.linear(x))


def same(sparse, model, x, **tolerances):
    got, expected = sparse(x), model(x)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerances)


ACTIVATIONS = {
    "nn.ReLU": (lambda m, x, y: m.act(y), nn.ReLU(), "relu"),
    "nn.ReLU in place": (lambda m, x, y: m.act(y), nn.ReLU(inplace=True), "relu"),
    "nn.GELU": (lambda m, x, y: m.act(y), nn.GELU(), "gelu"),
    "nn.GELU by tanh": (lambda m, x, y: m.act(y), nn.GELU("tanh"), "gelu_tanh"),
    "nn.SiLU": (lambda m, x, y: m.act(y), nn.SiLU(), "silu"),
    "F.relu": (lambda m, x, y: F.relu(y, True), None, "relu"),
    "F.gelu": (lambda m, x, y: F.gelu(y), None, "gelu"),
    "F.gelu by tanh": (lambda m, x, y: F.gelu(y, approximate="tanh"), None, "gelu_tanh"),
    "F.silu": (lambda m, x, y: F.silu(y, inplace=True), None, "silu"),
    "torch.relu": (lambda m, x, y: torch.relu(y), None, "relu"),
    "torch.relu_": (lambda m, x, y: torch.relu_(y), None, "relu"),
    "a method": (lambda m, x, y: y.tanh(), None, "tanh"),
    "a method in place": (lambda m, x, y: y.sigmoid_(), None, "sigmoid"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("capture", ["trace", "export"])
def test_an_activation(name, capture):
    then, module, epilogue = ACTIVATIONS[name]
    model, x = Then(then, act=module), torch.randn(5, 64)
    sparse = fused(model, Epilogue, example_inputs=(x,), capture=capture)
    assert calls(sparse) == [f"linear_fused {epilogue}"]
    same(sparse, model, x)


def test_an_activation_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    found = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "silu": "silu",
        "relu2": "relu_squared",
    }
    x = torch.randn(5, 64)
    for name, epilogue in found.items():
        model = Then(lambda m, x, y: m.act(y), act=activations.ACT2FN[name])
        sparse = fused(model, Epilogue)
        assert calls(sparse) == [f"linear_fused {epilogue}"]
        same(sparse, model, x)
        same(fxsparse.to_dense(sparse), model, x)


JOINS = {
    "y + x": (lambda m, x, y: y + x, "add"),
    "x + y": (lambda m, x, y: x + y, "add"),
    "torch.add": (lambda m, x, y: torch.add(x, y, alpha=1), "add"),
    "a method": (lambda m, x, y: x.add(y), "add"),
    "y * x": (lambda m, x, y: y * x, "mul"),
    "x * y": (lambda m, x, y: torch.mul(x, y), "mul"),
    "an activation, then a sum": (lambda m, x, y: x + F.gelu(y), "gelu add"),
    "an activation, then a product": (lambda m, x, y: F.silu(y) * x, "silu mul"),
}


#: Names that sets have, too: a trace that calls them is not trusted.
NOT_TRACED = ("torch.add", "a method", "a multiple")
BY_BOTH = [(name, how) for name in JOINS for how in ("trace", "export")]
BY_BOTH = [(name, how) for name, how in BY_BOTH if how == "export" or name not in NOT_TRACED]


@pytest.mark.parametrize("name, capture", BY_BOTH)
def test_a_sum_or_product(name, capture):
    then, epilogue = JOINS[name]
    model, x = Then(then), torch.randn(2, 5, 64)
    sparse = fused(model, Epilogue, example_inputs=(x,), capture=capture)
    assert calls(sparse) == [f"linear_with {epilogue}"]
    same(sparse, model, x)
    same(sparse, model, torch.randn(3, 64) if capture == "trace" else torch.randn(3, 4, 64))
    assert "linear_with" not in fxsparse.to_dense(sparse).code
    assert torch.equal(fxsparse.to_dense(sparse)(x), model(x))


def test_two_multiplies_that_are_added():
    model = Then(lambda m, x, y: y * F.silu(m.other(x)), other=nn.Linear(64, 64))
    sparse = fused(model, Epilogue)
    assert calls(sparse) == ["linear_fused silu", "linear_with mul"]
    same(sparse, model, torch.randn(5, 64))


class Joined(Then):
    def forward(self, x, other):
        return self.then(self, other, self.linear(x))


OTHERS = {
    "a row": torch.randn(64),
    "more dimensions": torch.randn(3, 5, 64),
    "one column": torch.randn(5, 1),
    "a scalar": torch.tensor(2.0),
    "a number": 3.0,
    "float64": torch.randn(5, 64, dtype=torch.float64),
    "bfloat16": torch.randn(5, 64).bfloat16(),
    "strided": torch.randn(64, 5).t(),
    "integers": torch.arange(64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_added_may_be_of_another_shape_or_type(name):
    x, other = torch.randn(5, 64), OTHERS[name]
    for then in (lambda m, x, y: x + y, lambda m, x, y: F.relu(y) * x):
        model = Joined(then)
        sparse = fused(model, Epilogue)
        assert calls(sparse)[0].startswith("linear_with")
        torch.testing.assert_close(sparse(x, other), model(x, other))


@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr"])
def test_what_is_added_may_be_of_a_sparse_layout(form):
    model, x = Joined(lambda m, x, y: y + x), torch.randn(5, 64)
    sparse = fused(model, Epilogue)
    other = getattr(torch.randn(5, 64).relu(), form)()
    with torch.no_grad():
        torch.testing.assert_close(sparse(x, other), model(x, other))


ORDERS = {
    "x + y": lambda m, x, y: x + y,
    "y + x": lambda m, x, y: y + x,
    "x * act(y)": lambda m, x, y: x * F.relu(y),
    "x + mlp(x)": lambda m, x, y: x + m.down(F.relu(y)),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("capture", ["trace", "export"])
def test_a_result_lies_in_memory_as_the_first_of_the_two(name, capture):
    model, x = Then(ORDERS[name], down=nn.Linear(64, 64)), torch.randn(3, 64, 5).transpose(1, 2)
    sparse = fused(model, Chain, Epilogue, example_inputs=(x,), capture=capture)
    assert calls(sparse)[0].split()[0] in ("linear_with", "mlp_with")
    for compiled in (sparse, pickle.loads(pickle.dumps(sparse)), fxsparse.to_dense(sparse)):
        same(compiled, model, x)
        assert compiled(x).stride() == model(x).stride()


LEFT = {
    "a multiple": lambda m, x, y: torch.add(x, y, alpha=2),
    "a sum that is written to": lambda m, x, y: y.add_(x),
    "a sum with itself": lambda m, x, y: y + y,
    "a constant": lambda m, x, y: y * m.scale,
    "another use": lambda m, x, y: F.gelu(y) + y.sum(),
    "an activation that is not known": lambda m, x, y: F.elu(y),
    "a view between": lambda m, x, y: F.relu(y.t()),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name):
    model, x = Then(LEFT[name]), torch.randn(64, 64)
    how = "export" if name in NOT_TRACED else "trace"
    sparse = fused(model, Epilogue, example_inputs=(x,), capture=how)
    assert calls(sparse)[0] == "linear"
    same(sparse, model, x)


def test_a_multiply_does_not_move_past_what_writes_to_its_input():
    class Written(Then):
        def forward(self, x):
            x = x * 2
            y = self.linear(x)
            x = x.relu_()
            return y + x

    model = Written(None)
    sparse = fused(model, Epilogue)
    assert calls(sparse) == ["mul", "linear", "relu_", "add"]
    same(sparse, model, torch.randn(5, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values(dtype):
    model = Then(lambda m, x, y: x + F.gelu(y)).to(dtype)
    sparse = fused(model, Epilogue)
    x = torch.randn(64, 7).to(dtype).t()  # strided
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {}
    same(sparse, model, x, **close)


def test_gradients_and_autocast():
    model = Then(lambda m, x, y: x + F.silu(y))
    sparse = fused(model, Epilogue)
    x = torch.randn(5, 64, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, model.linear.bias])
    got = torch.autograd.grad(sparse(x).sum(), [x, sparse.linear.bias])
    torch.testing.assert_close(got, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        same(sparse, model, x, rtol=2e-2, atol=2e-2)
