"""``torch.compile(model, backend="fxsparse")``."""

import gc
import importlib.metadata
import subprocess
import sys
import warnings

import pytest
import torch
from awkward_models import Plain
from pruned import prune, sparse_weight
from torch import nn

import fxsparse
import fxsparse.dynamo as dynamo

X = torch.randn(3, 64)


@pytest.fixture(autouse=True)
def _reset():
    yield
    torch._dynamo.reset()


@pytest.fixture
def packs(monkeypatch):
    """How often a weight was packed."""
    calls = []
    original = dynamo._pack
    monkeypatch.setattr(dynamo, "_pack", lambda *args: calls.append(1) or original(*args))
    return calls


@pytest.fixture
def multiplies(monkeypatch):
    """How often the sparse graph was called."""
    calls = []
    original = dynamo.packed_weight
    monkeypatch.setattr(dynamo, "packed_weight", lambda *args: calls.append(1) or original(*args))
    return calls


def _compile(model, **options):
    return torch.compile(model, backend="fxsparse", options={"min_elements": 0, **options})


def _multiplies(function):
    """How many multiplies by packed weights run in a call: an mlp without a gate is two."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    names = [event.name for event in profile.events() if event.name.startswith("fxsparse::")]
    return len(names) + names.count("fxsparse::mlp")


def test_multiplies_sparse_and_packs_once_for_all_recompiles(packs):
    class Spellings(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.w = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("c", sparse_weight(64, 64))
            self.dense = nn.Linear(64, 64)

        def forward(self, x):
            y = self.a(x).relu() @ self.w
            return self.dense(y) + torch.addmm(self.a.bias, x, self.c.t())

    model = prune(Spellings())
    nn.init.normal_(model.dense.weight)
    compiled = _compile(model)
    with torch.no_grad():
        for x in (X, torch.randn(5, 64), torch.randn(1, 64), torch.randn(2, 4, 64)[0]):
            torch.testing.assert_close(compiled(x), model(x))
        assert _multiplies(lambda: compiled(X)) == 3
    assert len(packs) == 3
    assert model.a.weight.is_leaf and "weight_packed" not in str(list(model.state_dict()))


def test_sees_weights_that_change(packs):
    model = prune(Plain()).requires_grad_(False)
    compiled = _compile(model)
    torch.testing.assert_close(compiled(X), model(X))
    model.a.weight.mul_(2)
    torch.testing.assert_close(compiled(X), model(X))
    model.a.weight.data = sparse_weight(64, 64)
    torch.testing.assert_close(compiled(X), model(X))
    model.b.weight = nn.Parameter(sparse_weight(64, 64), requires_grad=False)
    torch.testing.assert_close(compiled(X), model(X))
    assert len(packs) in (5, 6)  # Dynamo may compile anew for another parameter
    model.load_state_dict(prune(Plain()).state_dict())
    torch.testing.assert_close(compiled(X), model(X))
    model.a.weight.normal_()  # not sparse any more: dense
    assert not _multiplies(lambda: compiled(X))
    torch.testing.assert_close(compiled(X), model(X))


def test_gradients_are_the_models():
    model = prune(Plain())
    compiled = _compile(model)
    with pytest.warns(UserWarning, match=r"2 sparse weights require.*torch.no_grad\(\)"):
        compiled(X).sum().backward()
    got, model.a.weight.grad = model.a.weight.grad, None
    model(X).sum().backward()
    torch.testing.assert_close(got, model.a.weight.grad)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert _multiplies(lambda: compiled(X)) == 2

    model.a.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="1 sparse weights require"):
        compiled(X).sum().backward()
    assert model.b.weight.grad is not None
    model.b.weight.requires_grad_(False)
    grads = []
    for module in (model, compiled):
        x = X.clone().requires_grad_()
        model.a.bias.grad = None
        module(x).square().sum().backward()
        grads.append((x.grad, model.a.bias.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_options():
    model = prune(Plain()).requires_grad_(False)
    with pytest.raises(Exception, match="expected the options threshold.*got shrink"):
        _compile(model, shrink=True)(X)
    with pytest.raises(Exception, match="threshold: expected a sparsity"):
        _compile(model, threshold=2)(X)
    assert not _multiplies(lambda: _compile(model, threshold=0.99)(X))


def test_inference_mode_autocast_and_ties():
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    model[2].weight = model[0].weight
    compiled = _compile(model)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(X), model(X))
        assert _multiplies(lambda: compiled(X)) == 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(X), model(X)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)


def test_weights_that_are_read_elsewhere_stay_dense():
    class Reads(Plain):
        def forward(self, x):
            return self.b(self.a(x)) + self.a.weight.sum() * x

    model = prune(Reads()).requires_grad_(False)
    compiled = _compile(model)
    torch.testing.assert_close(compiled(X), model(X))
    assert _multiplies(lambda: compiled(X)) == 1


def test_stacks_and_look_ups_go_through_the_stand_in():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, 64, 64))

        def forward(self, x):
            y = torch.bmm(x.expand(3, -1, -1), self.stack)
            return y.sum(0) @ self.stack[1] + torch.einsum("bi,eio->bo", x, self.stack)

    model = prune(Experts()).requires_grad_(False)
    compiled = _compile(model)
    torch.testing.assert_close(compiled(X), model(X))
    model.stack.mul_(2)
    torch.testing.assert_close(compiled(X), model(X))


def test_packed_weights_go_with_the_model():
    before = len(dynamo._PACKED)
    model = prune(Plain()).requires_grad_(False)
    _compile(model)(X)
    assert len(dynamo._PACKED) == before + 2
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(dynamo._PACKED) == before


def test_is_found_by_its_entry_point_and_imports_dynamo_only_then():
    code = "import sys, fxsparse; print('torch._dynamo' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fxsparse")
    if not points:
        pytest.skip("needs fxsparse installed, with the entry points of its pyproject.toml")
    assert next(point.load() for point in points) is dynamo.backend
    assert "fxsparse" in torch._dynamo.list_backends()


def test_a_module_that_is_compiled_already_goes_through():
    model = prune(Plain()).requires_grad_(False)
    sparse = fxsparse.compile(model, min_elements=0)
    torch.testing.assert_close(_compile(sparse)(X), model(X))
