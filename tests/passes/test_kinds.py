"""Layers that are more than an ``nn.Linear``, and weights that are read in other ways, stay right."""

import pytest
import torch
import torch.nn.functional as F
from pruned import prune, sparse_weight
from torch import nn

import fxsparse


class Doubles(nn.Linear):
    scale = 2

    def forward(self, x):
        return self.scale * super().forward(x)


class Twice(nn.Linear):
    def twice(self, x):
        return self(self(x))


class Wide(nn.Module):
    """Two linears that something keeps from being plain, called so that it cannot be traced."""

    def __init__(self, first):
        super().__init__()
        self.a = first
        self.b = nn.Linear(64, 64)

    def forward(self, x, mask=None):
        x = self.a.twice(x) if hasattr(self.a, "twice") else self.a(x)
        return self.b(x)


def _with_mask():
    linear = nn.Linear(64, 64)
    linear.register_buffer("mask", torch.ones(64, 64))
    return linear


def _with_parameter():
    linear = nn.Linear(64, 64)
    linear.gain = nn.Parameter(torch.ones(1))
    return linear


def _with_wide_bias():
    linear = nn.Linear(64, 64)
    linear.bias = nn.Parameter(torch.randn(3, 64))
    return linear


def _with_own_hook():
    linear = nn.Linear(64, 64)
    linear.raw = linear._parameters.pop("weight")
    linear.register_forward_pre_hook(_doubled)
    _doubled(linear, ())
    return linear


def _doubled(module, args):
    module.weight = module.raw.detach() * 2


def _with_frozen_weight():
    linear = nn.Linear(64, 64)
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)
    return linear


MORE = {
    "mask": _with_mask,
    "parameter": _with_parameter,
    "wide bias": _with_wide_bias,
    "own hook": _with_own_hook,
    "buffer": _with_frozen_weight,
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_a_linear_stays_dense(name, inplace):
    model = prune(Wide(MORE[name]()))
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    torch.testing.assert_close(sparse(x), expected)
    rows = {row.path: row for row in sparse.report.rows}
    assert rows["b.weight"].status == "sparse"
    first = [row for path, row in rows.items() if path.startswith("a.")]
    assert first and all(row.status == "dense" and row.reason for row in first)


def test_every_matrix_that_a_graph_reads_has_a_row():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(sparse_weight(64, 64))
            self.v = nn.Parameter(sparse_weight(64 * 64, 1))
            self.m = nn.Parameter(torch.ones(64, 64))
            self.many = nn.ParameterList([sparse_weight(64, 64)])

        def forward(self, x):
            return F.linear(x, self.w * self.m) @ self.v.view(64, 64) + self.many[0].sum()

    with pytest.warns(fxsparse.NothingRewrittenWarning):
        report = fxsparse.compile(Reads(), min_elements=0).report
    assert {row.path for row in report.rows} == {"w", "v", "m", "many.0"}
    assert all(row.reason for row in report.rows)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 64), (1,)])
def test_biases_that_broadcast(shape):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(sparse_weight(64, 64))
            self.b = nn.Parameter(torch.randn(shape))

        def forward(self, x):
            return F.linear(x, self.w) + torch.addmm(self.b, x, self.w.t())

    model = Adds()
    sparse = fxsparse.compile(model, min_elements=0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))


def test_a_buffer_that_views_a_weight_keeps_it_dense():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = nn.Linear(64, 64)
            prune(self)
            self.register_buffer("row", self.a.weight.detach()[0])

        def forward(self, x, mask=None):
            return self.b(self.a(x)) + self.row

    model = Views()
    x = torch.randn(3, 64)
    expected = model(x)
    for inplace in (False, True):
        sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
        assert "shares its memory with the buffer 'row'" in sparse.report.rows[0].reason
        assert sparse.report.rows[1].status == "sparse"
        torch.testing.assert_close(sparse(x), expected)


def test_a_name_that_is_taken():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(sparse_weight(64, 64))
            self.w_packed = nn.Parameter(sparse_weight(64, 64))
            self.register_buffer("bits_packed", torch.ones(100, dtype=torch.uint8))

        def forward(self, x):
            return x @ self.w @ self.w_packed

    model = Taken()
    sparse = fxsparse.compile(model, min_elements=0)
    assert "has an attribute 'w_packed' already" in sparse.report.rows[0].reason
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))


def test_only_the_shape_is_read_of_a_second_name():
    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(sparse_weight(64, 64))
            self.w2 = nn.Parameter(self.w.detach())

        def forward(self, x):
            return x.view(-1, self.w2.shape[1]) @ self.w

    model = Second()
    sparse = fxsparse.compile(model, min_elements=0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sparse(x), model(x))


def test_a_forward_that_goes_through_its_parameters_keeps_them():
    class Base(nn.Module):
        def __init__(self, bias=True):
            super().__init__()
            self.a = nn.Linear(64, 64, bias=bias)

    class Sums(Base):
        def forward(self, x, flag=None):
            return self.a(x) + sum(p.pow(2).sum() for p in self.parameters())

    class First(Base):
        def forward(self, x, flag=None):
            return self.a(x.to(next(self.parameters()).dtype))

    x = torch.randn(3, 64)
    for model, status in ((Sums(), "dense"), (First(), "sparse"), (First(bias=False), "dense")):
        prune(model)
        if status == "dense":
            with pytest.warns(
                fxsparse.NothingRewrittenWarning, match="goes through its parameters"
            ):
                sparse = fxsparse.compile(model, min_elements=0)
        else:
            sparse = fxsparse.compile(model, min_elements=0)
        assert sparse.report.rows[0].status == status
        torch.testing.assert_close(sparse(x), model(x))


@pytest.mark.parametrize("kind", [Twice, Doubles])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_subclass_that_runs_the_forward_of_linear_keeps_its_class(kind, inplace):
    model = prune(Wide(kind(64, 64)))
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace)
    assert {row.path: row.status for row in sparse.report.rows}["a.weight"] == "sparse"
    assert type(sparse.a) is kind
    torch.testing.assert_close(sparse(x), expected)


def _doubles_the_weight(module, state, prefix, metadata):
    state[prefix + "weight"] = state[prefix + "weight"] * 2


def test_a_linear_whose_state_dict_is_hooked_stays_dense():
    model = prune(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    model[0].register_state_dict_post_hook(_doubles_the_weight)
    sparse = fxsparse.compile(model, min_elements=0)
    assert [row.status for row in sparse.report.rows] == ["dense", "sparse"]
    sparse.state_dict()


@pytest.mark.parametrize("inplace", [False, True])
def test_shallow_copies_that_share_their_dicts(inplace):
    import copy

    model = prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    model.add_module("2", copy.copy(model[0]))
    x = torch.randn(3, 64)
    expected = model(x)
    sparse = fxsparse.compile(model, min_elements=0, inplace=inplace, capture="modules")
    torch.testing.assert_close(sparse(x), expected)
