"""Pruning masks that were not removed become plain weights."""

import pytest
import torch
from fxsparse.passes.fold import fold_masks, has_masks
from torch import nn
from torch.nn.utils import prune

import fxsparse

METHODS = {
    "l1": lambda layer: prune.l1_unstructured(layer, "weight", 0.8),
    "random": lambda layer: prune.random_unstructured(layer, "weight", 0.8),
    "structured": lambda layer: prune.ln_structured(layer, "weight", 0.8, n=2, dim=0),
    "custom": lambda layer: prune.custom_from_mask(layer, "weight", torch.rand(64, 64) > 0.8),
    "iterative": lambda layer: [prune.l1_unstructured(layer, "weight", 0.6) for _ in range(2)],
    "weight and bias": lambda layer: [
        prune.l1_unstructured(layer, "weight", 0.8),
        prune.l1_unstructured(layer, "bias", 0.5),
    ],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_masks_are_folded(method, inplace, capture):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    METHODS[method](model[0])
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace, capture=capture)
    assert [row.path for row in sparse.report.rows] == ["0.weight", "2.weight"]
    assert sparse.report.rows[0].status == "sparse"
    assert sparse.report.rows[0].dense_bytes == 64 * 64 * 4
    assert not has_masks(sparse) and has_masks(model) is not inplace
    torch.testing.assert_close(sparse(x), expected)
    torch.testing.assert_close(model(x), expected)
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(fxsparse.to_dense(sparse).state_dict()) == names


def test_global_pruning_is_judged_layer_by_layer():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        model[0].weight.mul_(10)
    layers = [(layer, "weight") for layer in model]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.6)
    report = fxsparse.compile(model, min_elements=0).report
    assert [row.status for row in report.rows] == ["dense", "sparse"]
    assert report.rows[0].sparsity < 0.5 < report.rows[1].sparsity


def test_a_stale_weight_attribute_is_not_used():
    layer = nn.Linear(64, 64).eval()
    prune.l1_unstructured(layer, "weight", 0.8)
    with torch.no_grad():
        layer.weight_orig.mul_(2)  # layer.weight still holds the old product
    sparse = fxsparse.compile(nn.Sequential(layer), min_elements=0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), layer(x))


def test_folding_keeps_order_and_flags():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    prune.l1_unstructured(layer, "weight", 0.5)
    fold_masks(layer)
    assert list(layer._parameters) == ["weight", "bias"]
    assert not layer.weight.requires_grad and not layer._forward_pre_hooks


def test_an_untouched_pre_hook_stays():
    layer = nn.Linear(64, 64).eval()
    prune.l1_unstructured(layer, "weight", 0.8)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model = nn.Sequential(layer)
    sparse = fxsparse.compile(model, min_elements=0)
    assert sparse.report.rewritten == 1
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_weight_recomputed_by_a_hook_stays(norm):
    model = nn.Sequential(norm(nn.Linear(64, 64)), nn.Linear(64, 64)).eval()
    nn.utils.prune.remove(prune.l1_unstructured(model[1], "weight", 0.9), "weight")
    sparse = fxsparse.compile(model, min_elements=0)
    reasons = [row.reason for row in sparse.report.rows if row.path.startswith("0.")]
    assert reasons and all("recomputed" in reason for reason in reasons)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))
