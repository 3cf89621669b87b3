"""What does nothing is taken out of graphs; a dropout that may act in training is not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fusing import calls, fused
from fxsparse.passes.no_ops import NoOps
from pruned import prune
from torch import fx, nn

import fxsparse
from fxsparse.capture.submodules import GraphForward


def _graph(function, *args, **kwargs):
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(function, (x, *args), kwargs)
    graph.output(graph.call_function(torch.relu, (node,)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    "module, goes, goes_in_inference",
    [
        (nn.Identity(), True, True),
        (nn.Dropout(0), True, True),
        (nn.Dropout(0.1), False, True),
        (nn.AlphaDropout(0), False, False),
        (nn.ReLU(), False, False),
    ],
)
def test_modules(module, goes, goes_in_inference):
    for inference, expected in ((False, goes), (True, goes_in_inference)):
        traced = fx.symbolic_trace(nn.Sequential(module, nn.Tanh()))
        assert NoOps(inference)(traced).modified == expected
        assert calls(traced) == (["1"] if expected else ["0", "1"])


@pytest.mark.parametrize("dropout", [F.dropout, torch.dropout, torch.ops.aten.dropout.default])
def test_functions(dropout):
    name = "train" if dropout is not F.dropout else "training"
    assert calls(NoOps(False)(_graph(dropout, 0.1, False)).graph_module) == ["relu"]
    assert len(calls(NoOps(True)(_graph(dropout, 0.1, True)).graph_module)) == 2
    if dropout is F.dropout:
        assert calls(NoOps(False)(_graph(dropout, **{name: False})).graph_module) == ["relu"]
        assert len(calls(NoOps(False)(_graph(dropout)).graph_module)) == 2


WRITTEN = {
    "the copy": lambda x, y: (y.relu_(),),
    "a view of the copy": lambda x, y: (x + 1, y.view(-1).exp_()),
    "x": lambda x, y: (x.relu_(), y + 1),
    "by the caller": lambda x, y: (x, y),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_dropout_whose_copy_or_x_is_written_to_stays(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0)

        def forward(self, x):
            return WRITTEN[name](x, self.drop(x))

    traced = fx.symbolic_trace(Model())
    assert not NoOps(False)(traced).modified
    assert NoOps(True)(traced).modified


class Output(nn.Module):
    """The end of a layer of BERT."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout, self.norm = nn.Linear(64, 64), nn.Dropout(0.5), nn.LayerNorm(64)

    def forward(self, hidden, residual):
        return self.norm(self.dropout(self.dense(hidden)) + residual)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.output, self.out = Output(), nn.Linear(64, 64)

    def forward(self, x, flag=False):
        return self.out(self.output(x, x.exp())) if flag else self.output(x, x.cos())


def test_a_dropout_in_a_submodule_acts_in_training_again():
    model = prune(Model())
    sparse = fxsparse.compile(model, min_elements=0)
    forward = sparse.output.forward
    assert isinstance(forward, GraphForward)
    assert calls(forward) == ["linear_with add", "norm"]
    x = torch.randn(5, 64)
    for one in (sparse, copy.deepcopy(sparse)):
        torch.testing.assert_close(one(x), model(x))
        for drop in (one.train, one.output.dropout.train):
            drop()
            torch.manual_seed(1)
            got = one(x)
            model.train()
            torch.manual_seed(1)
            torch.testing.assert_close(got, model(x))
            model.eval()
            one.eval()
            assert not torch.equal(got, one(x))


def test_a_dropout_of_a_graph_acts_in_training():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    sparse = fused(model)
    assert calls(sparse) == ["linear", "1", "linear"]
    x = torch.randn(5, 64)
    torch.testing.assert_close(sparse(x), model(x))
    sparse.train()
    assert not torch.equal(sparse(x), sparse(x))
