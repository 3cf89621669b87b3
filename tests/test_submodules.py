"""Graphs of submodules of a model that cannot be traced as a whole."""

import copy
import io

import pytest
import torch
from pruned import multiplies, prune
from torch import nn

import fxsparse
from fxsparse.capture.submodules import GraphForward


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.act = nn.ReLU()
        self.extra = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.down(self.act(self.up(x))) @ self.extra


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 64)

    def forward(self, x):
        return self.gate(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.router = Mlp(), Router()

    def forward(self, x, scale=None):
        y = self.mlp(x) + self.router(x)
        return y if scale is None else y * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, flag=False):
        for block in self.blocks:
            x = block(x) if flag else block(x, 2.0)
        return x


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = prune(Model())
    return model, fxsparse.compile(model, min_elements=0)


def graph_of(module):
    forward = module.__dict__.get("forward")
    assert isinstance(forward, GraphForward)
    return forward


def same(sparse, model):
    x = torch.randn(3, 64)
    for flag in (False, True):
        torch.testing.assert_close(sparse(x, flag), model(x, flag), rtol=1e-4, atol=1e-4)


def test_the_largest_submodules_run_as_graphs_and_keep_their_class(pair):
    model, sparse = pair
    same(sparse, model)
    mlp = sparse.blocks[0].mlp
    targets = [str(node.target) for node in graph_of(mlp).graph.nodes]
    assert type(mlp) is Mlp and "blocks.0.mlp" not in targets
    assert multiplies(graph_of(mlp).graph) == 3
    assert "forward" not in sparse.blocks[0].__dict__
    assert all(row.status == "sparse" for row in sparse.report.rows)
    assert sparse.report.capture == "modules"
    graph_of(sparse.blocks[1].router)
    assert "forward" not in model.blocks[0].mlp.__dict__


def test_a_hook_below_a_graph_fires(pair):
    model, sparse = pair
    seen = []
    handle = sparse.blocks[0].mlp.up.register_forward_hook(lambda *_: seen.append(1))
    same(sparse, model)
    assert seen == [1, 1]
    handle.remove()
    same(sparse, model)
    assert seen == [1, 1] and graph_of(sparse.blocks[0].mlp).stands()


def test_a_child_that_is_replaced_is_used(pair):
    _, sparse = pair
    x = torch.randn(3, 64)
    sparse.blocks[0].router.gate = nn.Identity()
    assert sparse.blocks[0].router(x) is x


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_their_own_children(pair, how):
    model, sparse = pair
    if how == "deepcopy":
        again = copy.deepcopy(sparse)
        assert graph_of(again.blocks[0].mlp).owner is again.blocks[0].mlp
        assert graph_of(again.blocks[0].mlp).stands()
    else:
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    x = torch.randn(3, 64)
    expected = model(x)
    with torch.no_grad():
        for parameter in sparse.parameters():  # the copy does not read it
            parameter.fill_(float("nan"))
    torch.testing.assert_close(again(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inplace", [False, True])
def test_to_dense_runs_the_classes_forward(inplace):
    model = prune(Model())
    expected = copy.deepcopy(model)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    dense = fxsparse.to_dense(sparse)
    assert "forward" not in dense.blocks[0].mlp.__dict__
    assert dense.state_dict().keys() == expected.state_dict().keys()
    same(dense, expected)


def test_gradients_and_torch_compile(pair):
    model, sparse = pair
    x = torch.randn(3, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (got,) = torch.autograd.grad(sparse(x).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(sparse, fullgraph=True, backend="eager")
    same(compiled, model)


def test_a_submodule_without_a_sparse_weight_is_left_alone():
    model = Model().eval()
    prune(model.blocks[0])
    sparse = fxsparse.compile(model, min_elements=0)
    graph_of(sparse.blocks[0].mlp)
    assert "forward" not in sparse.blocks[1].mlp.__dict__
    same(sparse, model)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)
        self.on, self.scale, self.options = True, 1.0, {"shift": 0.0}
        self.act = nn.GELU()

    def forward(self, x):
        y = self.act(self.scaled(self.fc(x)) + self.options["shift"])
        return y if self.on else -y

    factor = 1.0

    def scaled(self, x):
        return x * self.scale * self.factor


def _off(block):
    block.on = False


def _scale(block):
    block.scale = 3.0


def _option(block):
    block.options["shift"] = 1.0


def _child_forward(block):
    old = block.fc.forward
    block.fc.forward = lambda x: old(x) + 1


def _class(block):
    block.__class__ = type("Other", (Scales,), {"forward": lambda self, x: x})


def _method(block):
    block.scaled = lambda x: x + 1


def _class_attribute(block):
    block.factor = 3.0


def _method_of_the_class(block):
    type(block).scaled = lambda self, x: x - 1


def _form_of_an_activation(block):
    block.act.approximate = "tanh"


CHANGES = [_off, _scale, _option, _child_forward, _class, _method, _class_attribute]
CHANGES += [_method_of_the_class, _form_of_an_activation]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("copied", [False, True])
def test_a_submodule_that_was_changed_runs_as_it_is_now(change, copied):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = type("Own", (Scales,), {})()

        def forward(self, x, skip=False):
            return x if skip else self.block(x)

    model = prune(Root())
    sparse = fxsparse.compile(model, min_elements=0)
    assert graph_of(sparse.block).stands()
    change(sparse.block)
    if copied:
        sparse = copy.deepcopy(sparse)
    change(model.block)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x), rtol=1e-4, atol=1e-4)
