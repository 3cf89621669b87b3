"""Public reports of sparse tensors that torch's compilers refuse: the packed ones are taken.

A test is named for the behaviour and cites the report.
"""

import pytest
import torch
from awkward_models import Optional
from pruned import multiplies, prune, sparse_weight
from torch import nn

import fxsparse
from fxsparse.packing import pack


def _model():
    return prune(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)))


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_a_compiled_module_is_one_graph(capture):
    """https://github.com/pytorch/pytorch/issues/171865"""
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module.graph)
        return graph_module

    model = _model()
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    compiled = torch.compile(sparse, backend=backend, fullgraph=True)
    for batch in (3, 8):
        x = torch.randn(batch, 64)
        torch.testing.assert_close(compiled(x), model(x))
    assert [multiplies(graph) for graph in graphs] == [2] * len(graphs)


def test_inductor_compiles_what_surrounds_the_operator():
    """https://github.com/pytorch/pytorch/issues/150083"""
    model = prune(Optional())
    sparse = fxsparse.compile(model, min_elements=0)
    assert sparse.report.rewritten == 2
    compiled = torch.compile(sparse, fullgraph=True)
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        with torch.profiler.profile() as profile:
            compiled(x)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["fxsparse::linear"] == 2


def test_the_operator_passes_opcheck_and_keeps_gradients():
    """https://github.com/mit-han-lab/torchsparse/issues/360"""
    weight = sparse_weight(96, 64)
    packed = pack(weight, format="bitmap")
    x = torch.randn(3, 64, requires_grad=True)
    bias = torch.randn(96, requires_grad=True)
    result = torch.library.opcheck(
        torch.ops.fxsparse.linear.default, (x, packed, bias, 96, 64, torch.float32, 0)
    )
    assert set(result.values()) == {"SUCCESS"}
    torch.ops.fxsparse.linear(x, packed, bias, 96, 64, torch.float32, 0).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 64))
    torch.testing.assert_close(bias.grad, torch.full((96,), 3.0))


def test_gradients_pass_through_a_module_under_torch_compile():
    """https://github.com/mit-han-lab/torchsparse/issues/360"""
    model = _model()
    sparse = fxsparse.compile(model, min_elements=0)
    grads = []
    for module in (model, torch.compile(sparse, backend="aot_eager", fullgraph=True)):
        x = torch.ones(2, 64, requires_grad=True)
        module(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("capture", ["trace", "modules"])
def test_export_takes_packed_weights(capture):
    """https://github.com/pytorch/pytorch/issues/123345"""
    model = _model()
    sparse = fxsparse.compile(model, min_elements=0, capture=capture)
    batch = torch.export.Dim("batch", min=1, max=1024)
    exported = torch.export.export(sparse, (torch.randn(2, 64),), dynamic_shapes=({0: batch},))
    assert multiplies(exported.graph) == 2
    assert {"0.weight_packed", "2.weight_packed"} <= set(exported.state_dict)
    x = torch.randn(7, 64)
    torch.testing.assert_close(exported.module()(x), model(x))
