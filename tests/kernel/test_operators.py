"""torch.ops.fxsparse: shapes, strides and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from kernel_support import DTYPES, check_product, pack

OPS = torch.ops.fxsparse
ROWS, COLS = 40, 70


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def weight(request) -> torch.Tensor:
    return torch.randn(ROWS, COLS).where(torch.rand(ROWS, COLS) < 0.3, 0.0).to(request.param)


def linear(x, weight, bias=None, threads=0):
    return OPS.linear(x, pack(weight), bias, ROWS, COLS, weight.dtype, threads)


def backward(grad, weight, threads=0):
    return OPS.linear_backward(grad, pack(weight), ROWS, COLS, weight.dtype, threads)


@pytest.mark.parametrize("lead", [(), (1,), (9,), (2, 3), (2, 1, 5, 2), (0,), (3, 0)], ids=str)
def test_leading_dimensions(weight, lead):
    x, bias = torch.randn(*lead, COLS).to(weight.dtype), torch.randn(ROWS).to(weight.dtype)
    y = linear(x, weight, bias)
    assert y.shape == (*lead, ROWS) and y.dtype == weight.dtype and y.is_contiguous()
    check_product(y.reshape(-1, ROWS), x.reshape(-1, COLS), weight, bias)
    grad = torch.randn(*lead, ROWS).to(weight.dtype)
    grad_x = backward(grad, weight)
    assert grad_x.shape == (*lead, COLS) and grad_x.is_contiguous()
    check_product(grad_x.reshape(-1, COLS), grad.reshape(-1, ROWS), weight.T)


STRIDED = {
    "rows apart": lambda dtype: torch.randn(9, 2 * COLS).to(dtype)[:, :COLS],
    "every other row": lambda dtype: torch.randn(9, COLS).to(dtype)[::2],
    "transposed": lambda dtype: torch.randn(COLS, 9).to(dtype).T,
    "expanded": lambda dtype: torch.randn(COLS).to(dtype).expand(5, COLS),
    "expanded inside": lambda dtype: torch.randn(3, 1, COLS).to(dtype).expand(3, 4, COLS),
    "swapped leading": lambda dtype: torch.randn(3, 4, COLS).to(dtype).transpose(0, 1),
    "sliced leading": lambda dtype: torch.randn(3, 8, COLS).to(dtype)[:, 2:5],
    "one of a leading": lambda dtype: torch.randn(3, 1, 5, COLS).to(dtype)[:, :, :1],
    "every other column": lambda dtype: torch.randn(9, 2 * COLS).to(dtype)[:, ::2],
    "channels last": lambda dtype: (
        torch.randn(2, 3, 4, COLS).to(dtype).contiguous(memory_format=torch.channels_last)
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_x(weight, name):
    x = STRIDED[name](weight.dtype)
    before = x.clone()
    y = linear(x, weight)
    assert y.is_contiguous()
    check_product(y.reshape(-1, ROWS), x.reshape(-1, COLS), weight)
    assert torch.equal(x, before)


def test_negated_views_are_resolved():
    weight = torch.randn(ROWS, COLS)
    x = torch.view_as_complex(torch.randn(9, COLS, 2)).conj().imag
    assert x.is_neg()
    check_product(linear(x, weight), x.resolve_neg(), weight)


def test_inputs_with_a_storage_offset(weight):
    x = torch.randn(3 + 9 * COLS).to(weight.dtype)[3:].view(9, COLS)
    bias = torch.randn(5 + ROWS).to(weight.dtype)[5:]
    check_product(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_threads(weight, threads):
    x = torch.randn(9, COLS).to(weight.dtype)
    assert torch.equal(linear(x, weight, threads=threads), linear(x, weight, threads=1))


def test_unpack(weight):
    dense = OPS.unpack(pack(weight), ROWS, COLS, weight.dtype)
    assert torch.equal(dense, weight) and dense.is_contiguous()


def test_works_under_inference_mode_and_no_grad(weight):
    x = torch.randn(9, COLS).to(weight.dtype)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            check_product(linear(x, weight), x, weight)


X, BIAS = torch.zeros(3, COLS), torch.zeros(ROWS)
F32 = torch.float32


@pytest.mark.parametrize(
    "change, text",
    [
        ({"x": X.bfloat16()}, "expected x of dtype float32 (the weight's), got bfloat16"),
        ({"x": X.long()}, "expected x of dtype float32 (the weight's), got int64"),
        (
            {"x": X[:, :-1]},
            "expected x with 70 values in its last dimension (in_features), got shape [3, 69]",
        ),
        ({"x": torch.tensor(1.0)}, "expected x with 1 to 64 dimensions, got 0"),
        ({"bias": BIAS.double()}, "expected bias of dtype float32 (the weight's), got float64"),
        ({"bias": BIAS[:-1]}, "expected bias of shape [40], got shape [39]"),
        ({"bias": BIAS[None]}, "expected bias of shape [40], got shape [1, 40]"),
        ({"packed": lambda p: p[:-1]}, "packed size: expected"),
        ({"packed": lambda p: p[:10]}, "expected at least 64 bytes, got 10"),
        (
            {"packed": lambda p: p[None]},
            "expected packed as a contiguous 1-D uint8 tensor, got uint8 of shape [1, ",
        ),
        (
            {"packed": lambda p: p.view(torch.int8)},
            "expected packed as a contiguous 1-D uint8 tensor, got int8",
        ),
        (
            {"packed": lambda p: p.repeat_interleave(2)[::2]},
            "expected packed as a contiguous 1-D uint8 tensor",
        ),
        ({"packed": torch.zeros(4416, dtype=torch.uint8)}, "packed magic: expected"),
        (
            {"out_features": 41},
            "expected out_features 40 and in_features 70 (the packed weight's), got 41 and 70",
        ),
        (
            {"in_features": 71},
            "expected out_features 40 and in_features 70 (the packed weight's), got 40 and 71",
        ),
        ({"dtype": torch.float64}, "expected dtype float32 (the packed weight's), got float64"),
        ({"threads": -1}, "expected threads of zero (any) or more, got -1"),
    ],
)
def test_refusals(change, text):
    arguments = {
        "x": X,
        "packed": pack(torch.ones(ROWS, COLS)),
        "bias": BIAS,
        "out_features": ROWS,
        "in_features": COLS,
        "dtype": F32,
        "threads": 0,
    }
    for name, value in change.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.raises(RuntimeError, match=re.escape(text)) as error:
        OPS.linear(**arguments)
    assert ".cpp" not in str(error.value).splitlines()[0]  # torch's own checks name their source


@pytest.mark.parametrize(
    "grad, text",
    [
        (torch.zeros(3, ROWS).half(), "expected grad of dtype float32 (the weight's), got float16"),
        (torch.zeros(3, COLS), "expected grad with 40 values in its last dimension (out_features)"),
        (torch.tensor(1.0), "expected grad with 1 to 64 dimensions, got 0"),
    ],
)
def test_refusals_of_the_gradient(grad, text):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        backward(grad, torch.ones(ROWS, COLS))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
@pytest.mark.parametrize("operator", ["linear", "conv1x1", "linear_fused", "linears", "mlp"])
@pytest.mark.parametrize("overload", ["default", "no_grad"])
def test_refused_calls_keep_nothing(operator, overload, rows):
    """``rows``: whether the weight is refused, before anything else is looked at, or only x is."""
    packed = pack(torch.ones(ROWS, COLS))
    call = getattr(getattr(OPS, operator), overload)
    dtype = [F32] if overload == "default" else []
    sizes = [rows, COLS] if overload == "default" else [rows]
    more = {"conv1x1": [2], "linear_fused": ["relu add"], "mlp": ["relu"]}.get(operator, [])
    before = resident_bytes()
    for _ in range(50):
        x, bias, other = (torch.ones(250_000) for _ in range(3))  # 1 MB each
        first = [x, packed, bias]
        if operator == "linear_fused":
            first += [other]
        elif operator == "linears":
            first, sizes[0] = [x, [packed, packed.clone()], [bias, other]], [rows, rows]
        elif operator == "mlp":
            first = [x, packed, bias, packed, None, packed, None, other]
            sizes = [COLS, ROWS, rows] if overload == "default" else [rows]
        with pytest.raises(RuntimeError):
            call(*first, *sizes, *dtype, 0, *more)
    assert resident_bytes() - before < 30e6


@pytest.mark.parametrize("mode", ["plain", "autograd", "autocast", "fake"])
def test_more_is_optional(mode):
    """Exported programs from before it call without, and every kernel takes both."""
    schema = OPS.linear.default._schema.arguments[7]
    assert (schema.name, schema.default_value) == ("more", False)
    weight = torch.randn(6, 5)
    packed, x = pack(weight), torch.randn(3, 5, requires_grad=mode == "autograd")
    if mode == "fake":
        x, packed = x.to("meta"), packed.to("meta")
    results = []
    with torch.autocast("cpu", enabled=mode == "autocast"):
        for more in ((), (False,), (True,)):
            y = OPS.linear(x, packed, None, 6, 5, torch.float32, 0, *more)
            results.append(y)
            if mode == "autograd":
                (x_grad,) = torch.autograd.grad(y.sum(), x)
                torch.testing.assert_close(x_grad, weight.sum(0).expand(3, 5))
    if mode != "fake":
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert {y.shape for y in results} == {(3, 6)}
