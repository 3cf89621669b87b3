"""Models that hold stand-ins for packed weights under torch.compile and torch.export."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pruned import prune, sparse_weight
from torch import nn

import fxsparse

D = 64


class Conv1D(nn.Module):
    """As in transformers: ``x @ W``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D, D))
        self.bias = nn.Parameter(torch.randn(D))

    def forward(self, x, scale=None):
        return torch.addmm(self.bias, x.view(-1, D), self.weight).view(x.shape)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x, scale=None):
        return self.attention(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        one = nn.TransformerEncoderLayer(D, 4, D, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(one, 1)

    def forward(self, x, scale=None):
        return self.encoder(x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.stack([sparse_weight(D, D) for _ in range(3)]))

    def forward(self, x, scale=None):
        flat = x.reshape(-1, D)
        y = sum(F.linear(flat, self.w[e]) for e in range(3)) + flat @ self.w[1].T
        return torch.bmm(y.expand(3, -1, -1), self.w.transpose(1, 2)).sum(0).view(x.shape)


class Gathered(Experts):
    def forward(self, x, scale=None):
        ids = (x[:, 0, 0] > 0).long()
        return torch.bmm(x, self.w[ids])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, D)
        self.head = nn.Linear(D, 100, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids, scale=None):
        return self.head(self.emb(ids))


MODELS = [Conv1D, Attention, Encoder, Experts, Gathered, Tied]


def given(kind, batch=2):
    return torch.randint(0, 100, (batch, 5)) if kind is Tied else torch.randn(batch, 5, D)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind, backend",
    [(kind, "eager" if kind is Encoder else "aot_eager") for kind in MODELS] + [(Conv1D, "eager")],
)
def test_torch_compile_makes_one_graph(kind, backend):
    torch._dynamo.reset()
    model = prune(kind())
    sparse = fxsparse.compile(model, min_elements=0, capture="modules")
    compiled = torch.compile(sparse, fullgraph=True, backend=backend)
    for batch in (2, 3):
        x = given(kind, batch)
        with torch.no_grad():
            close(compiled(x), model(x))
        close(compiled(x), model(x))
    if kind is not Tied:
        x = given(kind).requires_grad_()
        gradients = [torch.autograd.grad(m(x).pow(2).sum(), x)[0] for m in (compiled, model)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_torch_export_keeps_the_operators(kind):
    model = prune(kind())
    sparse = fxsparse.compile(model, min_elements=0, capture="modules")
    x = given(kind)
    exported = torch.export.export(sparse, (x,))
    close(exported.module()(x), model(x))
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert not any(
        name.startswith(("aten.linear", "aten.addmm", "aten.embedding")) for name in names
    )
    assert kind is Gathered or any(name.startswith("fxsparse.linear") for name in names)


def test_a_compiled_graph_sees_what_is_loaded():
    torch._dynamo.reset()
    for kind in (Conv1D, Experts):
        model, other = prune(kind()), prune(kind(), 0.8)
        sparse = fxsparse.compile(model, min_elements=0, capture="modules")
        compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
        x = given(kind)
        close(compiled(x), model(x))
        sparse.load_state_dict(
            fxsparse.compile(other, min_elements=0, capture="modules").state_dict()
        )
        close(sparse(x), other(x))
        close(compiled(x), other(x))
        close(copy.deepcopy(sparse)(x), other(x))
