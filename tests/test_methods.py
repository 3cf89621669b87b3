"""Methods that run by a graph, of modules that as a whole cannot be traced."""

import copy
import inspect
import io

import pytest
import torch
from pruned import operators_run, prune
from torch import nn

import fxsparse
from fxsparse.capture.submodules import GraphForward


def in_chunks(function, x, size):
    """As transformers' ``apply_chunking_to_forward``: it asks how many arguments there are."""
    assert len(inspect.signature(function).parameters) == 1
    return torch.cat([function(part) for part in x.split(size)])


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.act = nn.Linear(64, 128), nn.GELU()

    def forward(self, x):
        return self.act(self.dense(x))


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x, residual):
        return self.norm(self.dense(x) + residual)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up, self.down = nn.Linear(64, 64), Up(), Down()
        self.size = 2

    def __call__(self, *args, **kwargs):  # as transformers' layers do
        return super().__call__(*args, **kwargs)

    def forward(self, x, mask=None):
        x = self.attention(x)
        if mask is not None:
            x = x + mask
        return in_chunks(self.feed_forward, x, self.size)

    def feed_forward(self, x):
        return self.down(self.up(x), x)


class Model(nn.Module):
    def __init__(self, layer=Layer):
        super().__init__()
        self.layer = layer()

    def forward(self, x, **options):
        return self.layer(x, **options)


def compiled(layer=Layer, **options):
    torch.manual_seed(0)
    model = prune(Model(layer))
    return model, fxsparse.compile(model, min_elements=0, **options)


def graph_of(layer):
    graph = layer.__dict__.get("feed_forward")
    assert isinstance(graph, GraphForward)
    return graph


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


X = torch.randn(4, 64)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_method_becomes_one_graph_and_the_rest_stays(inplace):
    torch.manual_seed(0)
    model = prune(Model())
    expected = model(X), model(X, mask=X)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    same((sparse(X), sparse(X, mask=X)), expected)
    graph = graph_of(sparse.layer)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert len([t for t in targets if "dense.weight_packed" in t]) == 2
    assert graph.stands() and "forward" not in sparse.layer.up.__dict__
    assert type(sparse.layer.attention) is fxsparse.SparseLinear
    rows = {row.path: row.status for row in sparse.report.rows if len(row.shape) == 2}
    assert rows == dict.fromkeys(
        [f"layer.{name}.weight" for name in ("attention", "up.dense", "down.dense")], "sparse"
    )


def test_its_signature_is_the_methods():
    _, sparse = compiled()
    signature = inspect.signature(sparse.layer.feed_forward)
    assert signature == inspect.signature(Model().layer.feed_forward)


def _hook(layer):
    layer.up.dense.register_forward_hook(lambda *a: a[2] + 1)


def _child(layer):
    layer.down.norm = nn.Identity()


def _method(layer):
    layer.feed_forward = lambda x: x + 1


def _class(layer):
    method = lambda self, x: self.up(x)[:, :64]  # noqa: E731
    layer.__class__ = type("Other", (type(layer),), {"feed_forward": method})


def _elsewhere(layer):
    layer.attention.register_forward_hook(lambda *a: a[2] + 1)


@pytest.mark.parametrize("change", [_hook, _child, _method, _class, _elsewhere])
@pytest.mark.parametrize("copied", [False, True])
def test_what_was_changed_since_runs_as_it_is_now(change, copied):
    model, sparse = compiled()
    if copied:
        sparse = copy.deepcopy(sparse)
    same(sparse(X), model(X))
    change(model.layer), change(sparse.layer)
    same(sparse(X), model(X))
    if change is _elsewhere:  # none of the graph's business
        assert graph_of(sparse.layer).stands()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_their_own_children(how):
    model, sparse = compiled()
    if how == "deepcopy":
        again = copy.deepcopy(sparse)
        assert graph_of(again.layer).owner is again.layer and graph_of(again.layer).stands()
    else:
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    expected = model(X)
    with torch.no_grad():
        for tensor in [*sparse.parameters(), *sparse.buffers()]:
            tensor.zero_()
    same(again(X), expected)


def test_the_way_back():
    model, sparse = compiled()
    dense = fxsparse.to_dense(sparse)
    assert "feed_forward" not in dense.layer.__dict__
    assert dense.state_dict().keys() == model.state_dict().keys()
    same(dense(X), model(X))


def test_gradients_and_torch_compile():
    model, sparse = compiled()
    x = X.clone().requires_grad_()
    got, want = (torch.autograd.grad(m(x).sum(), x) for m in (sparse, model))
    same(got, want)
    same(torch.compile(sparse, fullgraph=True, backend="eager")(X), model(X))


class SharesAChild(Layer):
    def forward(self, x, mask=None):
        return self.feed_forward(x) if mask is None else self.up(x)


class ReadsAParameter(Layer):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def feed_forward(self, x):
        return self.down(self.up(x), x) * self.scale


class Optional(Layer):
    def feed_forward(self, x, again=False):
        return self.down(self.up(x), x)

    def forward(self, x, mask=None):
        return self.feed_forward(x, again=mask is not None)


class Branches(Layer):
    def feed_forward(self, x):
        return self.down(self.up(x), x) if x.sum() > 0 else x


class HandsItselfOn(Layer):
    def feed_forward(self, x):
        return run(self, x)


def run(layer, x):
    return layer.down(layer.up(x), x)


class Inherits(Layer):
    def feed_forward(self, x):
        return super().feed_forward(x)


@pytest.mark.parametrize(
    "kind", [SharesAChild, ReadsAParameter, Optional, Branches, HandsItselfOn, Inherits]
)
def test_others_stay_as_they_are(kind):
    model, sparse = compiled(kind)
    assert "feed_forward" not in sparse.layer.__dict__
    assert isinstance(sparse.layer.up.__dict__.get("forward"), GraphForward)
    for x in (X, -X):
        same((sparse(x), sparse(x, mask=x)), (model(x), model(x, mask=x)))
    assert operators_run(lambda: sparse(X))["aten.addmm.default"] == 0
