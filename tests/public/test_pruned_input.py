"""Public reports of pruned models that a tool misreads: masks, wrappers, uneven or no sparsity.

A test is named for the behaviour and cites the report.
"""

from pathlib import Path

import pytest
import torch
from awkward_models import Branch, Plain
from pruned import operators_run, prune
from torch import nn
from torch.nn.utils import prune as torch_prune

import fxsparse


def _mlp():
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_masks_on_some_layers_only(inplace):
    """https://github.com/NVIDIA/retinanet-examples/issues/257"""
    model = _mlp().eval()
    torch_prune.l1_unstructured(model[0], "weight", 0.9)
    torch_prune.l1_unstructured(model[4], "weight", 0.8)
    x = torch.randn(3, 64)
    expected = model(x)
    compiled = fxsparse.compile(model, min_elements=0, inplace=inplace)
    torch.testing.assert_close(compiled(x), expected)
    status = {row.path: row.status for row in compiled.report.rows}
    assert status == {"0.weight": "sparse", "2.weight": "dense", "4.weight": "sparse"}
    assert not any("orig" in key or "mask" in key for key in compiled.state_dict())


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, torch.compile, lambda model: torch.compile(nn.DataParallel(model))],
    ids=["DataParallel", "torch.compile", "both"],
)
def test_a_wrapper_hides_no_mask(wrap):
    """https://github.com/microsoft/nni/issues/5277"""
    model = _mlp().eval()
    torch_prune.l1_unstructured(model[0], "weight", 0.9)
    compiled = fxsparse.compile(wrap(model), min_elements=0)
    rows = {row.path: row for row in compiled.report.rows}
    assert rows["0.weight"].status == "sparse"
    assert rows["0.weight"].sparsity == pytest.approx(0.9, abs=0.001)
    x = torch.randn(3, 64)
    torch.testing.assert_close(compiled(x), model(x))
    assert operators_run(lambda: compiled(x))["fxsparse.linear.default"] == 1


def test_nothing_converted_is_a_loud_warning():
    """https://github.com/microsoft/nni/issues/5277"""
    with pytest.warns(
        fxsparse.NothingRewrittenWarning, match="none of 3 weights has the 50 % zeros"
    ):
        fxsparse.compile(nn.DataParallel(_mlp().eval()), min_elements=0)


def test_the_report_shows_the_sparsity_of_each_layer():
    """https://github.com/DeGirum/pruned-models/issues/2"""
    model = _mlp().eval()
    sparsities = [0.0, 0.3, 0.95]
    for layer, sparsity in zip(model[::2], sparsities):
        prune(layer, sparsity)
    compiled = fxsparse.compile(model, min_elements=0)
    rows = compiled.report.rows
    assert [row.sparsity for row in rows] == pytest.approx(sparsities, abs=0.002)
    assert [row.status for row in rows] == ["dense", "dense", "sparse"]
    assert "sparsity 0 % is below the threshold of 50 %" in rows[0].reason
    assert "sparsity 30 % is below the threshold of 50 %" in rows[1].reason
    lines = str(compiled.report).splitlines()
    assert any("0.weight" in line and "0.0 %" in line for line in lines)
    x = torch.randn(3, 64)
    torch.testing.assert_close(compiled(x), model(x))


def test_a_model_without_weights_to_pack_comes_back_with_a_warning():
    """https://github.com/VainF/Torch-Pruning/issues/136"""
    model = nn.Sequential(nn.LayerNorm(8), nn.ReLU()).eval()
    with pytest.warns(fxsparse.NothingRewrittenWarning, match="the model has no weights"):
        result = fxsparse.compile(model)
    assert result is model and result.report.rows == []
    x = torch.randn(3, 8)
    torch.testing.assert_close(result(x), nn.LayerNorm(8)(x).relu())


def test_the_requirements_are_stated_and_tracing_is_none_of_them():
    """https://github.com/pytorch/pytorch/pull/90403"""
    readme = Path(__file__).parents[2] / "README.md"
    requirements = readme.read_text().split("## Requirements")[1].split("\n## ")[0]
    assert "It need not be traceable" in requirements
    model = nn.Sequential(Branch(), Plain())
    for layer in (model[0].a, model[1].b):  # whole rows at once
        torch_prune.ln_structured(layer, "weight", 0.75, n=2, dim=0)
    compiled = fxsparse.compile(model.eval(), min_elements=0)
    status = {row.path: row.status for row in compiled.report.rows}
    assert status == {
        "0.a.weight": "sparse",
        "0.b.weight": "dense",
        "1.a.weight": "dense",
        "1.b.weight": "sparse",
    }
    for x in (torch.randn(3, 64), -torch.ones(3, 64), torch.ones(3, 64)):
        torch.testing.assert_close(compiled(x), model(x))
