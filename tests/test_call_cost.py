"""What makes a call cheap, told by what runs, not by the clock; and where it must not be done."""

import copy
import pickle

import pytest
import torch
from functorch.compile import make_boxed_func
from pruned import prune, sparse_weight
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.nn.utils import parametrize
from torch.nn.utils import prune as torch_prune

import fxsparse
from fxsparse import ops
from fxsparse.capture.graph_module import SparseGraphModule
from fxsparse.capture.submodules import GraphForward
from fxsparse.packing import pack

N, K = 48, 96


@pytest.fixture
def model():
    return prune(nn.Sequential(nn.Linear(64, 80), nn.Softplus(), nn.Linear(80, 64)))


@pytest.fixture
def sparse(model):
    return fxsparse.compile(model, min_elements=0)


@pytest.fixture
def x():
    return torch.randn(3, 64)


@pytest.fixture
def cheap_calls(monkeypatch):
    """How often an overload without gradients is called, in a list of one number."""
    count = [0]

    def counted(operator):
        def call(*args):
            count[0] += 1
            return operator(*args)

        return call

    for name in ("_linear_no_grad", "_conv1x1_no_grad"):
        monkeypatch.setattr(ops, name, counted(getattr(ops, name)))
    return count


# ---- the overloads without gradients ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (K,)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_overloads_without_gradients_pass_opcheck(shape, bias):
    packed, bias = pack(sparse_weight(N, K), format="csr"), torch.randn(N) if bias else None
    opcheck(torch.ops.fxsparse.linear.no_grad, (torch.randn(shape), packed, bias, N, 2, True))
    image = torch.randn(2, K, 3, 5)
    opcheck(torch.ops.fxsparse.conv1x1.no_grad, (image, packed, bias, N, 0, 2))


def _fused(x):
    """Each fused operator, its overload without gradients, and their arguments."""
    up, down = (pack(sparse_weight(n, k), format="csr") for n, k in ((N, K), (K, N)))
    bias, fxs = torch.randn(N), torch.ops.fxsparse
    sizes, other = (N, K, torch.float32, 2), torch.randn(*x.shape[:-1], N)
    weights = (up, bias, up, None, down, None)
    return [
        (fxs.linear_fused, (x, up, bias, other, *sizes, "gelu add", True), (3, 4, 7, 8, 9)),
        (fxs.linears, (x, [up, up], [bias, None], [N, N], *sizes[1:], True), (3, 6, 7)),
        (fxs.mlp, (x, *weights, x, K, N, K, *sizes[2:], "silu", True), (7, 10, 12, 13, 14)),
    ]


def test_the_fused_overloads_give_the_same_and_pass_opcheck():
    for operator, args, kept in _fused(torch.randn(5, K)):
        first = min(kept)
        short = (*args[:first], *(args[i] for i in kept))
        opcheck(operator.no_grad, short)
        torch.testing.assert_close(
            operator.no_grad(*short), operator.default(*args), rtol=0, atol=0
        )
        with pytest.raises(RuntimeError, match="expected x with 96 values"):
            operator.no_grad(args[0][:, 1:], *short[1:])
        with pytest.raises(RuntimeError, match="threads"):
            operator.no_grad(*[-1 if type(each) is int and each == 2 else each for each in short])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_fused_overloads_are_called_where_nothing_requires_a_gradient(mode):
    for operator, args, _ in _fused(torch.randn(5, K)):
        run = ops.QUICK[operator.default]
        with mode(), torch.profiler.profile() as profile:
            y = run(*args)
        torch.testing.assert_close(y, operator.default(*args))
        assert sum(event.key.startswith("fxsparse::") for event in profile.key_averages()) == 1


def test_the_fused_operators_have_gradients_through_the_quick_way():
    for operator, args, _ in _fused(torch.randn(5, K)):
        x, *rest = args
        gradients = []
        for call in (ops.QUICK[operator.default], operator.default):
            leaf = x.clone().requires_grad_()
            y = call(leaf, *[leaf if each is x else each for each in rest])
            y = sum(y) if isinstance(y, list) else y
            gradients.append(torch.autograd.grad(y.square().sum(), leaf)[0])
        torch.testing.assert_close(*gradients)


def test_they_give_the_same_and_check_as_much():
    packed, bias, x = pack(sparse_weight(N, K), format="csr"), torch.randn(N), torch.randn(5, K)
    no_grad = torch.ops.fxsparse.linear.no_grad
    expected = ops.linear(x, packed, bias, N, K, torch.float32, 0)
    assert torch.equal(no_grad(x, packed, bias, N), expected)
    for wrong, why in (
        ((x[:, 1:], packed, bias, N), "expected x with 96 values"),
        ((x.double(), packed, bias, N), "expected x of dtype float32"),
        ((x, packed, bias, N + 1), "expected out_features 48"),
        ((x, packed[:-1], bias, N), "packed size"),
        ((x, packed, bias[1:], N), "expected bias of shape"),
        ((x, packed, bias.double(), N), "expected bias of dtype float32"),
        ((x, packed, bias, N, -1), "threads"),
    ):
        with pytest.raises(RuntimeError, match=why):
            no_grad(*wrong)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_they_are_called_where_nothing_requires_a_gradient(model, sparse, x, mode, cheap_calls):
    for parameter in [*model.parameters(), *sparse.parameters()]:
        parameter.requires_grad_(False)
    layer = fxsparse.SparseLinear.from_linear(model[0])
    conv = fxsparse.compile(prune(nn.Sequential(nn.Conv2d(64, 64, 1))).requires_grad_(False))
    with mode():
        torch.testing.assert_close(sparse(x), model(x))
        torch.testing.assert_close(layer(x), model[0](x))
        conv(torch.randn(1, 64, 2, 2))
    assert cheap_calls == [4]


def _gradients(module, x):
    x = x.clone().requires_grad_()
    wanted = [x, *(p for p in module.parameters() if p.dim() == 1)]
    return torch.autograd.grad(module(x).square().sum(), [w for w in wanted if w.requires_grad])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_the_dense_model(dtype, frozen):
    linears = nn.Sequential(nn.Linear(64, 80), nn.Softplus(), nn.Linear(80, 64))
    convs = nn.Sequential(nn.Conv1d(64, 80, 1), nn.ReLU(), nn.Conv1d(80, 64, 1))
    for model in (prune(linears.to(dtype)), prune(convs.to(dtype))):
        model.requires_grad_(not frozen)
        x = torch.randn(2, 64, 64, dtype=dtype)
        got = _gradients(fxsparse.compile(model, min_elements=0), x)
        assert len(got) == (1 if frozen else 3)
        torch.testing.assert_close(
            got, _gradients(model, x), atol=0.1 * (dtype.itemsize == 2) + 1e-3, rtol=5e-2
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_tangent_raises(sparse, x, mode):
    sparse.requires_grad_(False)
    with mode(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        sparse(forward_ad.make_dual(x, x))


def test_a_transform_around_another_raises(sparse, x):
    """At the inner level neither x nor the bias requires a gradient, at the outer one x does."""
    sparse.requires_grad_(False)

    def outer(t):
        return torch.func.grad(lambda u: (sparse(t * 2) * u[:, :64]).sum())(x).sum()

    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(outer)(x)


def test_a_graph_that_is_recorded_has_the_operator_with_gradients(sparse, x, cheap_calls):
    sparse.requires_grad_(False)
    with torch.no_grad():
        names = [str(node.target) for node in make_fx(sparse)(x).graph.nodes]
        exported = [
            str(node.target)
            for strict in (True, False)
            for node in torch.export.export(sparse, (x,), strict=strict).graph.nodes
        ]
        traced = torch.jit.trace(sparse, x, check_trace=False).inlined_graph
    assert names.count("fxsparse.linear.default") == 2
    assert exported.count("fxsparse.linear.default") == 4
    assert str(traced).count("fxsparse::linear(") == 2
    assert cheap_calls == [0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_compiled_code_calls_the_overload_without_gradients(sparse, x, mode):
    graphs = []

    def compiler(graph_module, example_inputs):
        graphs.append([str(node.target) for node in graph_module.graph.nodes])
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    with mode():
        torch.testing.assert_close(torch.compile(sparse, backend=backend)(x), sparse(x))
    assert graphs[0].count("fxsparse.linear.no_grad") == 2


def test_autocast(model, sparse, x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = sparse(x), model(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=3e-2, rtol=3e-2)


# ---- the code that runs -------------------------------------------------------------------------


@pytest.fixture
def attribute_reads(monkeypatch):
    """The names that went through nn.Module.__getattr__."""
    names, read = [], nn.Module.__getattr__

    def recorded(self, name):
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(nn.Module, "__getattr__", recorded)
    return names


def test_constants_come_from_the_dicts(model, sparse, x, attribute_reads):
    expected = model(x)
    layer = fxsparse.SparseLinear.from_linear(model[0])
    attribute_reads.clear()
    torch.testing.assert_close(sparse(x), expected)
    assert attribute_reads == ["1"]  # the Softplus
    layer(x)
    assert attribute_reads == ["1"]
    assert "self._modules" not in sparse.code  # what is printed is what fx writes
    assert 'getattr(self, "0").weight_packed' in sparse.code


def test_what_is_loaded_or_replaced_is_seen(model, sparse, x):
    other = prune(nn.Sequential(nn.Linear(64, 80), nn.Softplus(), nn.Linear(80, 64)))
    for assign in (False, True):
        sparse.load_state_dict(fxsparse.compile(other, min_elements=0).state_dict(), assign=assign)
        torch.testing.assert_close(sparse(x), other(x))
        sparse.load_state_dict(fxsparse.compile(model, min_elements=0).state_dict(), assign=assign)
        torch.testing.assert_close(sparse(x), model(x))
    first = sparse.get_submodule("0")
    first.bias = nn.Parameter(torch.zeros(80))
    torch.testing.assert_close(sparse(x), model[2](model[1](model[0](x) - model[0].bias)))
    sparse.add_module("0", fxsparse.SparseLinear.from_linear(other[0]))
    torch.testing.assert_close(sparse(x), model[2](model[1](other[0](x))))


class _Double(nn.Module):
    def forward(self, bias):
        return 2 * bias


@pytest.mark.parametrize("how", ["prune", "parametrize"])
def test_a_bias_that_is_computed_since_is_seen(model, sparse, x, how):
    layer = fxsparse.SparseLinear.from_linear(model[2])
    for each in (model[0], model[2], sparse.get_submodule("0"), layer):
        if how == "prune":
            torch_prune.l1_unstructured(each, "bias", amount=0.5)
        else:
            parametrize.register_parametrization(each, "bias", _Double())
    torch.testing.assert_close(
        sparse(x), model[0:2](x) @ model[2].weight.T + sparse.get_submodule("2").bias
    )
    torch.testing.assert_close(layer(model[0](x)), model[2](model[0](x)))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_read_their_own(model, sparse, x, how, attribute_reads):
    copied = how(sparse)
    with torch.no_grad():
        copied.get_submodule("2").bias.zero_()
    attribute_reads.clear()
    y = copied(x)
    assert attribute_reads == ["1"]
    torch.testing.assert_close(y, model(x) - model[2].bias)
    torch.testing.assert_close(sparse(x), model(x))
    assert copied.code.split() == sparse.code.split()


class _Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x


def test_a_buffer_of_a_module_that_is_called_is_read_after_it():
    root = nn.Module()
    root.leaf = _Counts()
    graph = fx.Graph()
    y = graph.call_module("leaf", (graph.placeholder("x"),))
    graph.output(graph.call_function(torch.add, (y, graph.get_attr("leaf.calls"))))
    module = SparseGraphModule(root, graph)
    assert [module(torch.zeros(())).item() for _ in range(3)] == [1, 2, 3]


def test_a_module_with_lookups_of_its_own_keeps_them():
    class Doubles(nn.Module):
        def __getattr__(self, name):
            value = super().__getattr__(name)
            return 2 * value if name == "scale" else value

    owner = Doubles()
    owner.register_buffer("scale", torch.ones(()))
    graph = fx.Graph()
    graph.output(graph.call_function(torch.mul, (graph.placeholder("x"), graph.get_attr("scale"))))
    assert GraphForward(owner, graph)(torch.ones(())).item() == 2
