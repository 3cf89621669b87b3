"""Linears that a forward which is not traced calls one after the other with the same tensor."""

import copy
import io
import threading
import weakref

import pytest
import torch
from pruned import operators_run, prune
from torch import nn

import fxsparse
from fxsparse.modules import siblings
from fxsparse.modules.siblings import SiblingLinear


class Attention(nn.Module):
    """Cannot be traced: it branches on an argument, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 48, bias=False)
        self.o = nn.Linear(64, 64)

    def forward(self, x, cache=None):
        shape = (*x.shape[:-1], -1)
        q = self.q(x).view(shape).squeeze(-2)
        k = self.k(x).view(shape).squeeze(-2)
        v = self.v(x)
        if cache is not None:
            k = k + cache
        return q, k, v, self.o(q)


class Model(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.attention = attention()

    def forward(self, x, **options):
        return self.attention(x, **options)


def compiled(attention=Attention, **options):
    torch.manual_seed(0)
    model = prune(Model(attention))
    return model, fxsparse.compile(model, min_elements=0, **options)


def calls(run):
    """How often several weights were multiplied by one call, and how often one."""
    found = operators_run(run)
    return found["fxsparse.linears.default"], found["fxsparse.linear.default"]


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


X = torch.randn(3, 64)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_call_computes_what_each_would(mode):
    model, sparse = compiled()
    with mode():
        x = X.clone()
        assert calls(lambda: sparse(x)) == (1, 1)
        got = sparse(x)
        same(got, model(x))
        layers = sparse.attention
        for y, layer in zip(got, (layers.q, layers.k, layers.v)):
            assert type(layer) is SiblingLinear and isinstance(layer, fxsparse.SparseLinear)
            assert torch.equal(y, fxsparse.SparseLinear.forward(layer, x))
    assert type(sparse.attention.o) is fxsparse.SparseLinear


def test_each_output_is_a_tensor_of_its_own():
    _, sparse = compiled()
    q, k, *_ = sparse(X)
    assert q.untyped_storage().nbytes() == 4 * q.numel()
    assert q._base is None or q._base.shape == q.shape
    before = k.clone()
    q.fill_(0)
    assert torch.equal(k, before)


def test_gradients_are_those_of_each():
    model, sparse = compiled()
    with torch.enable_grad():
        x = X.clone().requires_grad_()
        assert calls(lambda: sparse(x)) == (0, 4)
        got = torch.autograd.grad(
            sum(y.square().sum() for y in sparse(x)), [x, sparse.attention.q.bias]
        )
        want = torch.autograd.grad(
            sum(y.square().sum() for y in model(x)), [x, model.attention.q.bias]
        )
        same(got, want)
        sparse.requires_grad_(False)
        assert calls(lambda: sparse(X)) == (1, 1)  # nothing wants one


def test_autocast_and_a_wrong_dtype_are_as_without():
    model, sparse = compiled()
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(lambda: sparse(X)) == (0, 4)
        got, want = sparse(X), model(X)
    assert [y.dtype for y in got] == [y.dtype for y in want]
    with pytest.raises((ValueError, RuntimeError), match="float64"):
        sparse(X.double())


def test_nothing_is_kept_after_forward_not_even_after_an_error():
    class Fails(Attention):
        def forward(self, x, fail=False):
            q = self.q(x)
            n = len(fail) if fail else 0
            k = self.k(x)
            return q, k, n

    _, sparse = compiled(Fails)
    x = X.clone()
    gone = weakref.ref(x)
    with pytest.raises(TypeError):
        sparse(x, fail=True)
    assert siblings._current.run is None
    del x
    assert gone() is None
    assert calls(lambda: sparse.attention.q(X)) == (0, 1)  # outside of forward each is by itself


class Rebound(Attention):
    def forward(self, x, cache=None):
        q = self.q(x)
        x = x + 1
        return q, self.k(x), self.v(x)


class Written(Attention):
    def forward(self, x, cache=None):
        x = x.clone()
        q = self.q(x)
        x.mul_(2)
        return q, self.k(x), self.v(x)


class WrittenElsewhere(Attention):
    def forward(self, x, cache=None):
        x, q = x.clone(), None
        other = {"x": x}
        q = self.q(x)
        self.write(other)
        return q, self.k(x)

    @staticmethod
    def write(other):
        other["x"] *= 2


class Branches(Attention):
    def forward(self, x, cache=None):
        q = self.q(x)
        k = self.k(x) if cache is None else self.k(cache)
        if cache is not None:
            return q, k
        return q, k, self.v(x)


class Repeated(Attention):
    def forward(self, x, cache=None):
        first = self.q(x)
        k = self.k(x)
        return first, k, self.q(k.repeat(1, 2))


@pytest.mark.parametrize(
    "kind, expected",
    [
        (Rebound, (1, 1)),  # k and v
        (Written, (1, 1)),
        (WrittenElsewhere, (0, 2)),
        (Branches, (0, 3)),
        (Repeated, (0, 3)),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_only_what_surely_follows_with_the_same_tensor(kind, expected, mode):
    model, sparse = compiled(kind)
    with mode():
        x = X.clone()
        same(sparse(x), model(x))
        assert calls(lambda: sparse(x)) == expected
        if kind is Branches:
            same(sparse(x, cache=x + 1), model(x, cache=x + 1))


class Cross(Attention):
    def __init__(self):
        super().__init__()
        self.v = nn.Linear(64, 32)

    def forward(self, x, encoded=None):
        q = self.q(x)
        states = encoded if encoded is not None else x
        k, v = self.k(states), self.v(states)
        return q, k, v


def test_keys_and_values_of_other_states_are_two():
    model, sparse = compiled(Cross)
    assert calls(lambda: sparse(X, encoded=X + 1)) == (1, 1)
    same(sparse(X, encoded=X + 1), model(X, encoded=X + 1))
    same(sparse(X), model(X))


def test_different_threads_stay_apart():
    _, sparse = compiled(threads={"attention.q.weight": 1, "attention.k.weight": 2})
    assert calls(lambda: sparse(X)) == (0, 4)
    _, sparse = compiled(threads={"attention.q.weight": 1, "attention.[kv].weight": 2})
    assert calls(lambda: sparse(X)) == (1, 2)


def test_a_dense_one_between_them():
    torch.manual_seed(0)
    model = prune(Model())
    model.attention.k.weight.fill_(0.1)
    sparse = fxsparse.compile(model, min_elements=0)
    assert type(sparse.attention.k) is nn.Linear
    assert calls(lambda: sparse(X)) == (1, 1)
    same(sparse(X), model(X))
    change = lambda _, args: args[0].mul_(2)  # noqa: E731
    with torch.inference_mode():
        for m in (model, sparse):
            m.attention.k.register_forward_pre_hook(change)
        same(sparse(X.clone()), model(X.clone()))


def _hook(sparse):
    sparse.attention.k.register_forward_hook(lambda *a: a[2] + 1)


def _pre_hook(sparse):
    sparse.attention.k.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))


def _forward(sparse):
    old = sparse.attention.k.forward
    sparse.attention.k.forward = lambda x: old(x) + 1


def _forward_that_writes(sparse):
    old = sparse.attention.k.forward
    sparse.attention.k.forward = lambda x: old(x.mul_(2))


def _child(sparse):
    sparse.attention.k = nn.Linear(64, 32)
    sparse.attention.k.weight.data.fill_(0.1)
    sparse.attention.k.bias.data.fill_(0.1)


def _class(sparse):
    kind = type(sparse.attention)
    forward = lambda self, x, cache=None: (self.k(x), self.q(x.mul_(2)))  # noqa: E731
    sparse.attention.__class__ = type("Other", (kind,), {"forward": forward})


def _parent(sparse):
    sparse.attention.forward = lambda x: (sparse.attention.q(x), sparse.attention.k(x.mul_(2)))


@pytest.mark.parametrize(
    "change", [_hook, _pre_hook, _forward, _forward_that_writes, _child, _class, _parent]
)
@pytest.mark.parametrize("copied", [False, True])
def test_what_was_changed_since_runs_as_it_is_now(change, copied):
    model, sparse = compiled()
    if copied:
        sparse = copy.deepcopy(sparse)
    with torch.inference_mode():
        sparse(X.clone())
        change(model), change(sparse)
        same(sparse(X.clone()), model(X.clone()))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_together_with_their_own_weights(how):
    model, sparse = compiled()
    if how == "deepcopy":
        again = copy.deepcopy(sparse)
    else:
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    expected = model(X)
    for tensor in [*sparse.parameters(), *sparse.buffers()]:  # the copy does not read them
        tensor.zero_()
    assert calls(lambda: again(X)) == (1, 1)
    same(again(X), expected)
    same(copy.deepcopy(again.attention.q)(X), expected[0])


def test_weights_that_are_loaded_are_used():
    model, sparse = compiled()
    other = prune(Model(), 0.8)
    for assign in (False, True):
        sparse.load_state_dict(fxsparse.compile(other, min_elements=0).state_dict(), assign=assign)
        assert calls(lambda: sparse(X)) == (1, 1)
        same(sparse(X), other(X))
        sparse.load_state_dict(model.state_dict())
        same(sparse(X), model(X))


def test_the_way_back_and_names_are_those_of_each():
    model, sparse = compiled()
    assert [row.node for row in sparse.report.rows] == [f"attention.{n}" for n in "qkvo"]
    assert "attention.k.weight_packed" in sparse.state_dict()
    dense = fxsparse.to_dense(sparse)
    assert type(dense.attention.q) is nn.Linear and "forward" not in dense.attention.__dict__
    assert dense.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(dense.state_dict()[k], v) for k, v in model.state_dict().items())


def test_threads_do_not_see_each_other():
    model, sparse = compiled()
    inputs = [torch.randn(3, 64) for _ in range(4)]
    expected, got = [model(x) for x in inputs], [None] * 4

    @torch.no_grad()
    def work(i):
        for _ in range(50):
            got[i] = sparse(inputs[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    same(got, expected)


def test_torch_jit_records_each():
    model, sparse = compiled()
    traced = torch.jit.trace(sparse, X, check_trace=False)
    assert str(traced.inlined_graph).count("fxsparse::linear(") == 4
    same(traced(X + 1), model(X + 1))


def test_vmap_maps_each():
    class Sum(Attention):
        def forward(self, x, cache=None):
            return self.q(x).sum(-1) + self.k(x).sum(-1) + self.v(x).sum(-1)

    model, sparse = compiled(Sum)
    x = torch.randn(2, 3, 64)
    same(torch.vmap(sparse)(x), torch.vmap(model)(x))


class WithoutLooking(Attention):
    def forward(self, x, cache=None):
        if cache is None:
            return self.q(x), self.k(x)


def test_no_tensor_at_all_is_refused_as_by_one():
    texts = []
    for options in ({}, {"threads": 1}):
        _, sparse = compiled(WithoutLooking, **options)
        with pytest.raises(Exception) as refused:
            sparse(None)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


def test_torch_compile_sees_each():
    model, sparse = compiled()
    same(torch.compile(sparse, fullgraph=True, backend="eager")(X), model(X))
