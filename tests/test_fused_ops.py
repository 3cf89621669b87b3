"""Operators of more than one multiply: torch's own checks, and the same as one step at a time."""

import pytest
import torch
from pruned import sparse_weight
from torch.library import opcheck

from fxsparse import ops
from fxsparse.epilogues import ACTIVATIONS, apply, find_function, find_module, joins
from fxsparse.packing import pack

N, H, K = 48, 80, 96
EPILOGUES = [*ACTIVATIONS, "add", "mul", "gelu add", "silu mul"]


def weight(rows, cols, dtype=torch.float32, format="csr"):
    return pack(sparse_weight(rows, cols, 0.7, dtype), format=format)


def close(got, expected):
    """Equal up to a few units in the last place of the result's scale."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    unit = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_linear_fused_is_the_sequence(epilogue, dtype):
    packed, x = weight(N, K, dtype), torch.randn(2, 9, K).to(dtype)
    bias = torch.randn(N).to(dtype)
    other = torch.randn(2, N, 9).to(dtype).mT if joins(epilogue) else None
    got = ops.linear_fused(x, packed, bias, other, N, K, dtype, 0, epilogue)
    close(got, apply(epilogue, ops.linear(x, packed, bias, N, K, dtype, 0), other))


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_linears_are_the_linears(batch):
    sizes, x = [N, 16, H], torch.randn(batch, K)
    packed = [weight(n, K, format=f) for n, f in zip(sizes, ("csr", "tiles", "pairs"))]
    biases = [None, torch.randn(16), torch.randn(H)]
    got = ops.linears(x, packed, biases, sizes, K, torch.float32, 0)
    for y, weight_, bias, n in zip(got, packed, biases, sizes):
        assert y.is_contiguous()
        assert torch.equal(y, ops.linear(x, weight_, bias, n, K, torch.float32, 0))
    assert len({y.untyped_storage().data_ptr() for y in got}) == 3


@pytest.mark.parametrize("gradient", [False, True])
def test_negated_views_are_resolved(gradient):
    x, other, weights = torch.randn(5, K), torch.randn(5, N), [weight(N, K)] * 2
    bias = torch.randn(N, requires_grad=gradient)
    packed, half = weights[0], (N, K, x.dtype, 0)
    expected = ops.linear(-x, packed, -bias, *half)
    x, bias, other = (torch._neg_view(tensor) for tensor in (x, bias, other))
    got = ops.linear_fused(x, packed, bias, other, *half, "add")
    torch.testing.assert_close(got, expected + other)
    got = ops.linears(x, weights, [bias, None], [N, N], *half[1:])
    torch.testing.assert_close(got[0], expected)
    torch.testing.assert_close(got[1], ops.linear(x, packed, None, *half))
    got = torch.ops.fxsparse.linears.no_grad(x, weights, [bias, None], [N, N], 0)
    torch.testing.assert_close(got[0], expected)


def mlp_arguments(x, gated, residual, activation="gelu", dtype=torch.float32, format="csr"):
    gate = (weight(H, K, dtype, format), torch.randn(H).to(dtype)) if gated else (None, None)
    up = weight(H, K, dtype, format), torch.randn(H).to(dtype)
    down = weight(N, H, dtype, format), torch.randn(N).to(dtype)
    added = torch.randn(*x.shape[:-1], N).to(dtype) if residual else None
    return x, *gate, *up, *down, added, K, H, N, dtype, 0, activation


@pytest.mark.parametrize("gated", [False, True])
def test_mlp_passes_opcheck(gated):
    x = torch.randn(5, K)
    opcheck(ops.mlp, mlp_arguments(x, gated, residual=gated))
    opcheck(ops.mlp, mlp_arguments(x.requires_grad_(), gated, residual=not gated))


def test_linear_fused_and_linears_pass_opcheck():
    x, packed, bias = torch.randn(2, 3, K), weight(N, K), torch.randn(N)
    other = torch.randn(2, 3, N)
    for grad in (False, True):
        x.requires_grad_(grad)
        opcheck(ops.linear_fused, (x, packed, bias, other, N, K, x.dtype, 0, "gelu add"))
        opcheck(ops.linear_fused, (x, packed, bias, None, N, K, x.dtype, 0, "silu"))
        opcheck(ops.linears, (x, [packed, packed], [bias, None], [N, N], K, x.dtype, 0))


def test_gradients():
    double = torch.float64
    x, other = torch.randn(3, K, dtype=double, requires_grad=True), torch.randn(3, N, dtype=double)
    other.requires_grad_()
    packed, bias = weight(N, K, double), torch.randn(N, dtype=double, requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, bias, other: ops.linear_fused(
            x, packed, bias, other, N, K, double, 0, "gelu mul"
        ),
        (x, bias, other),
    )
    torch.autograd.gradcheck(
        lambda x, bias: ops.linears(x, [packed, packed], [bias, None], [N, N], K, double, 0),
        (x, bias),
    )
    arguments = mlp_arguments(x, True, True, "silu", double)
    torch.autograd.gradcheck(
        lambda x, residual: ops.mlp(x, *arguments[1:7], residual, *arguments[8:]), (x, other)
    )


# pairs hands panels on by itself; with tiles and bitmap rows are made into panels; csr has others.
MIXED = [("pairs",) * 3, ("tiles",) * 3, ("bitmap",) * 3, ("csr", "tiles", "pairs")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("formats", MIXED, ids="-".join)
def test_mlp_is_the_multiplies_one_by_one(formats, gated, dtype):
    """Bit for bit, for any number of threads, for few rows, whole panels and what is left of them."""
    features, hidden, out = 200, 333, 130
    sizes = [(hidden, features), (hidden, features), (out, hidden)]
    gate, up, down = (
        pack(sparse_weight(*size, 0.8, dtype), format=f) for size, f in zip(sizes, formats)
    )
    biases = [torch.randn(n).to(dtype) for n in (hidden, hidden, out)]
    for batch in (1, 7, 16, 128, 301):
        x, residual = torch.randn(batch, features).to(dtype), torch.randn(batch, out).to(dtype)
        if batch > 100:
            x[3, 5], x[batch - 2, 7] = float("inf"), float("nan")
            x[70] *= 300  # infinite where float16 cannot hold it
        middle = ops.linear(x, up, biases[1], hidden, features, dtype, 1)
        if gated:
            arguments = (x, gate, biases[0], hidden, features, dtype, 1)
            first = ops.linear_fused(*arguments[:3], middle, *arguments[3:], "silu mul")
        else:
            first = ops.linear_fused(x, up, biases[1], None, hidden, features, dtype, 1, "silu")
        expected = ops.linear(first, down, biases[2], out, hidden, dtype, 1) + residual
        for threads in (1, 2, 3):
            got = ops.mlp(
                x, *((gate, biases[0]) if gated else (None, None)), up, biases[1], down, biases[2],
                residual, features, hidden, out, dtype, threads, "silu",
            )  # fmt: skip
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def fused_calls(x):
    """One call of each operator, gated and with what joins y."""
    weights = weight(N, K, x.dtype), torch.randn(N).to(x.dtype)
    other = torch.randn(*x.shape[:-1], N).to(x.dtype)
    rest = (N, K, x.dtype, 0)
    return {
        ops.linear_fused: (x, *weights, other, *rest, "silu add"),
        ops.linears: (x, weights[:1] * 2, [weights[1], None], [N, N], *rest[1:]),
        ops.mlp: mlp_arguments(x, True, True, "silu", x.dtype),
    }


def test_under_autocast_as_torchs_own_sequence():
    for operator, arguments in fused_calls(torch.randn(5, K)).items():
        with torch.autocast("cpu", torch.bfloat16):
            got = operator(*arguments)
        expected = operator(*arguments)
        got, expected = (got[0], expected[0]) if isinstance(got, list) else (got, expected)
        # What joins y is float32, and torch's sum of both is, too.
        assert got.dtype == (torch.bfloat16 if operator is ops.linears else torch.float32)
        torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.1)


def test_a_tangent_is_refused_as_by_linear():
    for operator, arguments in fused_calls(torch.randn(5, K)).items():
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(arguments[0], torch.ones(5, K))
            with pytest.raises(NotImplementedError, match="forward"):
                operator(x, *arguments[1:])


def replaced(arguments, **changes):
    arguments = list(arguments)
    for place, value in changes.items():
        arguments[int(place[1:])] = value
    return arguments


WRONG = [
    (ops.linear_fused, {"_8": "gelu_erf"}, r"expected an .*gelu_erf"),
    (ops.linear_fused, {"_8": "add silu"}, r"expected an .*add silu"),
    (ops.linear_fused, {"_8": "silu"}, "expected other"),
    (ops.linear_fused, {"_3": None}, "expected other"),
    (ops.linear_fused, {"_3": torch.randn(1, N)}, "expected other of the result's shape"),
    (ops.linear_fused, {"_3": torch.randn(5, N).double()}, "expected other of"),
    (ops.linears, {"_2": [None]}, "expected as many biases"),
    (ops.linears, {"_1": [], "_2": [], "_3": []}, "expected as many biases"),
    (ops.mlp, {"_7": torch.randn(5, H)}, "expected residual of the result's shape"),
    (ops.mlp, {"_13": "add"}, "expected an activation"),
    (ops.mlp, {"_1": None}, "expected gate_bias with gate alone"),
]


@pytest.mark.parametrize("operator, changes, message", WRONG)
def test_wrong_arguments_are_refused_by_real_and_fake_tensors(operator, changes, message):
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = replaced(fused_calls(torch.randn(5, K))[operator], **changes)
    with pytest.raises(RuntimeError, match=message):
        operator(*arguments)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        convert = mode.from_tensor
        operator(
            *(
                convert(a)
                if isinstance(a, torch.Tensor)
                else [convert(t) if isinstance(t, torch.Tensor) else t for t in a]
                if isinstance(a, list | tuple)
                else a
                for a in arguments
            )
        )


def test_names_of_torchs_functions_and_modules():
    from torch import nn
    from torch.nn import functional as F

    x = torch.randn(3)
    for name, entry in ACTIVATIONS.items():
        for function in entry.functions:
            assert find_function(function, (x,), {}) == name
            torch.testing.assert_close(function(x), entry.reference(x))
        for method in entry.methods:
            assert find_function(method, (x,), {}) == name
            torch.testing.assert_close(getattr(x, method)(), entry.reference(x))
        for module in entry.modules:
            assert find_module(module(), x.dtype) == name
            torch.testing.assert_close(module()(x), entry.reference(x))
    assert find_function(F.gelu, (x,), {}) == "gelu"
    assert find_function(F.gelu, (x,), {"approximate": "tanh"}) == "gelu_tanh"
    assert find_module(nn.GELU(), x.dtype) == "gelu"
    assert find_module(nn.GELU("tanh"), x.dtype) == "gelu_tanh"
    assert find_function(F.silu, (x,), {"inplace": True}) == "silu"
    for target, kwargs in ((torch.add, {}), ("view", {}), (torch.sigmoid, {"out": x})):
        assert find_function(target, (x,), kwargs) is None
    assert find_module(nn.ELU(), x.dtype) is None


def test_names_of_transformers_activations():
    activations = pytest.importorskip("transformers.activations")
    x, half = torch.randn(100), torch.randn(100).bfloat16()
    found = set()
    for name in activations.ACT2FN:
        module = activations.ACT2FN[name]
        wide, narrow = find_module(module, x.dtype), find_module(module, half.dtype)
        if wide:
            torch.testing.assert_close(module(x), ACTIVATIONS[wide].reference(x))
        if narrow:
            assert torch.equal(module(half), ACTIVATIONS[narrow].reference(half))
        found.add(wide)
    assert {"gelu", "gelu_tanh", "quick_gelu", "relu_squared", "silu", "relu"} <= found
    assert find_module(activations.ACT2FN["gelu_new"], half.dtype) is None
