"""The whole public API in one short file: read this first."""

import copy
import io
import warnings

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import prune

import fxsparse


@pytest.fixture
def model():
    """A pruned model whose masks are still in place."""
    net = nn.Sequential(
        nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    prune.l1_unstructured(net[0], "weight", 0.9)
    prune.l1_unstructured(net[2], "weight", 0.8)
    return net.eval()


@pytest.fixture
def x():
    return torch.randn(7, 96)


def test_compile_gives_a_graph_with_equal_outputs(model, x):
    sparse = fxsparse.compile(model)
    assert isinstance(sparse, fx.GraphModule)
    torch.testing.assert_close(sparse(x), model(x))
    torch.testing.assert_close(sparse(x[:1]), model(x[:1]))


def test_a_successful_compile_warns_of_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxsparse.compile(model)


def test_report(model):
    report = fxsparse.compile(model).report
    assert [(row.path, row.status) for row in report.rows] == [
        ("0.weight", "sparse"),
        ("2.weight", "sparse"),
        ("4.weight", "dense"),
    ]
    assert report.rows[0].sparsity == pytest.approx(0.9, abs=1e-3)
    assert "below the threshold" in report.rows[2].reason
    assert report.saved_bytes == report.dense_bytes - report.stored_bytes > 0
    assert "2 of 3 weights sparse" in str(report)


def test_report_bytes_are_what_a_loop_over_the_module_counts(model):
    sparse = fxsparse.compile(model)
    tensors = [*sparse.parameters(), *sparse.buffers()]
    assert sparse.report.stored_bytes == sum(t.numel() * t.element_size() for t in tensors)
    prune.remove(model[0], "weight")
    prune.remove(model[2], "weight")
    assert sparse.report.dense_bytes == sum(p.numel() * 4 for p in model.parameters())


def test_inspect_is_a_dry_run(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fxsparse.inspect(model) == fxsparse.compile(model).report
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_options(model):
    only = fxsparse.compile(model, include=["2.*"], threads=1).report
    assert [row.status for row in only.rows] == ["dense", "sparse", "dense"]
    assert only.rows[1].threads == 1
    assert fxsparse.compile(model, threshold=0.85).report.rewritten == 1
    assert fxsparse.compile(model, min_elements=10_000).report.rewritten == 1
    assert not isinstance(fxsparse.compile(model, capture="modules"), fx.GraphModule)


def test_nothing_to_rewrite_is_a_warning_and_the_model_back(x):
    dense = nn.Linear(96, 96)
    with pytest.warns(fxsparse.NothingRewrittenWarning, match="none of 1 weights"):
        result = fxsparse.compile(dense)
    assert torch.equal(result(x), dense(x))
    assert (result.report.rewritten, result.report.saved_bytes) == (0, 0)


def test_inplace_rewrites_the_models_own_modules(model, x):
    expected = model(x)
    sparse = fxsparse.compile(model, inplace=True)
    assert isinstance(model[0], fxsparse.SparseLinear)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(sparse(x), expected)
    assert model[0].weight_packed is sparse.get_submodule("0").weight_packed


def test_verify(model, x):
    fxsparse.compile(model, (x,), verify=True)
    with pytest.raises(ValueError, match="example_inputs"):
        fxsparse.compile(model, verify=True)


def test_to_dense_is_bit_for_bit(model):
    sparse = fxsparse.compile(model)
    dense = fxsparse.to_dense(sparse)
    assert not hasattr(dense, "report")
    prune.remove(model[0], "weight")
    prune.remove(model[2], "weight")
    assert dense.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(dense.state_dict()[name], value + 0.0), name


def test_sparse_linear(x):
    linear = nn.Linear(96, 40)
    prune.remove(prune.random_unstructured(linear, "weight", 0.7), "weight")
    sparse = fxsparse.SparseLinear.from_linear(linear)
    torch.testing.assert_close(sparse(x), linear(x))
    assert (sparse.in_features, sparse.out_features) == (96, 40)
    assert sparse.weight.shape == linear.weight.shape
    assert torch.equal(sparse.weight + 0, linear.weight + 0)


def test_the_result_is_an_ordinary_module(model, x):
    sparse = fxsparse.compile(model)
    expected = sparse(x)
    assert torch.equal(copy.deepcopy(sparse)(x), expected)
    assert copy.deepcopy(sparse).report == sparse.report
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(x), expected)
    sparse.load_state_dict(loaded.state_dict())
    assert "0.weight_packed" in sparse.state_dict()


def test_gradients_reach_x_and_the_bias(model, x):
    sparse = fxsparse.compile(model)
    bias = sparse.get_submodule("0").bias
    assert bias is model[0].bias
    grads = []
    for module in (sparse, model):
        leaf = x.clone().requires_grad_()
        bias.grad = None
        module(leaf).square().sum().backward()
        grads.append((leaf.grad, bias.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_threads(model, x):
    default = fxsparse.get_num_threads()
    try:
        fxsparse.set_num_threads(1)
        one = fxsparse.compile(model)(x)
        fxsparse.set_num_threads(2)
        assert torch.equal(fxsparse.compile(model)(x), one)
    finally:
        fxsparse.set_num_threads(default)
    assert isinstance(fxsparse.cpu_features(), dict)


def test_wrong_options_are_named(model):
    with pytest.raises(ValueError, match="threshold"):
        fxsparse.compile(model, threshold=1.5)
    with pytest.raises(ValueError, match="closest: 0.weight"):
        fxsparse.compile(model, include=["0.wieght"])
    with pytest.raises(NotImplementedError, match="values"):
        fxsparse.compile(model, values=torch.bfloat16)
