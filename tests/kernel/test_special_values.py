"""NaN, Inf, signed zeros and denormals in weights and activations: what a dense product would say."""

import math

import pytest
import torch
from kernel_support import DTYPES, KERNEL_IDS, KERNELS, backward, check_product, forward, pack

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)
BAD = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}


def dense_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every product, then their sum: no BLAS that might skip or reorder special cases."""
    return (x.double()[:, None, :] * weight.double()[None]).sum(-1)


def check_special(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    expected = dense_product(x, weight)
    assert torch.equal(got.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert torch.equal(got.double()[infinite], expected[infinite])
    plain = expected.isfinite()
    scale = (x.double().abs().nan_to_num(0, 0, 0) @ weight.double().abs().nan_to_num(0, 0, 0).T) + 1
    eps = torch.finfo(got.dtype).eps + torch.finfo(torch.float32).eps * weight.shape[1]
    assert ((got.double() - expected).abs()[plain] <= (eps * scale)[plain]).all()


def pruned(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    weight = (torch.randn(rows, cols) * (torch.rand(rows, cols) < 0.5)).to(dtype)
    weight[:, 3] = 1  # a column without zeros
    weight[:, 4] = 0  # and one without anything else
    weight[5] = 2
    weight[6] = 0
    return weight


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@every_kernel
def test_dropped_zeros_times_nonfinite_x_are_nan(kernel, bad):
    dtype = DTYPES[kernel["value"]]
    weight = pruned(40, 21, dtype)
    packed = pack(weight, kernel["format"])
    for batch in (1, 5, 33):
        for column in (0, 3, 4, 20):
            x = torch.randn(batch, 21).to(dtype)
            x[batch // 2, column] = bad
            check_special(forward(kernel["isa"], packed, x), x, weight)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@every_kernel
def test_dropped_zeros_times_nonfinite_gradients_are_nan(kernel, bad):
    dtype = DTYPES[kernel["value"]]
    weight = pruned(21, 40, dtype)
    packed = pack(weight, kernel["format"])
    for batch in (1, 5, 33):
        for row in (0, 5, 6, 20):
            grad = torch.randn(batch, 21).to(dtype)
            grad[batch // 2, row] = bad
            check_special(backward(kernel["isa"], packed, grad), grad, weight.T)


@every_kernel
def test_several_nonfinite_values_in_several_rows(kernel):
    dtype = DTYPES[kernel["value"]]
    weight = pruned(40, 40, dtype)
    packed = pack(weight, kernel["format"])
    x = torch.randn(30, 40).to(dtype)
    x[torch.rand(30, 40) < 0.05] = math.inf
    x[torch.rand(30, 40) < 0.05] = -math.inf
    x[17] = math.nan
    check_special(forward(kernel["isa"], packed, x), x, weight)
    check_special(backward(kernel["isa"], packed, x), x, weight.T)


@pytest.mark.parametrize("kind", ["all", "one_column", "scattered"])
@every_kernel
def test_whole_panels_of_nonfinite_rows(kernel, kind):
    dtype = DTYPES[kernel["value"]]
    weight = pruned(40, 50, dtype)
    packed = pack(weight, kernel["format"])
    for width, product, w in ((50, forward, weight), (40, backward, weight.T)):
        x = torch.randn(130, width).to(dtype)
        if kind == "all":
            x[:] = math.nan
        elif kind == "one_column":
            x[:, 3] = math.inf
        else:
            x[torch.arange(130), torch.arange(130) % width] = math.inf
        check_special(product(kernel["isa"], packed, x), x, w)


@every_kernel
def test_nonfinite_values_are_found_by_any_number_of_threads(kernel, num_threads):
    num_threads(8)
    dtype = DTYPES[kernel["value"]]
    weight = (torch.randn(400, 500) * (torch.rand(400, 500) < 0.6)).to(dtype)
    packed = pack(weight, kernel["format"])
    x = torch.randn(50, 500).to(dtype)
    x[3, 100] = math.inf
    lost = weight[:, 100] == 0
    for threads in (1, 8):
        y = forward(kernel["isa"], packed, x, threads=threads)
        assert torch.equal(y[3].isnan(), lost)
        assert y[[i for i in range(50) if i != 3]].isfinite().all()


@every_kernel
def test_nonfinite_weights_are_multiplied(kernel):
    dtype = DTYPES[kernel["value"]]
    weight = pruned(40, 21, dtype)
    weight[1, 2], weight[2, 7], weight[3, 1] = math.inf, -math.inf, math.nan
    packed = pack(weight, kernel["format"])
    for batch in (1, 9):
        x = torch.randn(batch, 21).to(dtype)
        x[0, 2] = 0  # 0 * Inf
        check_special(forward(kernel["isa"], packed, x), x, weight)
        grad = torch.randn(batch, 40).to(dtype)
        check_special(backward(kernel["isa"], packed, grad), grad, weight.T)


@every_kernel
def test_minus_zero_is_a_dropped_zero(kernel):
    dtype = DTYPES[kernel["value"]]
    weight = torch.tensor([[-0.0, 1.0], [2.0, -0.0]], dtype=dtype)
    x = torch.tensor([[math.inf, 1.0], [3.0, -0.0]], dtype=dtype)
    y = forward(kernel["isa"], pack(weight, kernel["format"]), x)
    assert y[0, 0].isnan() and y[0, 1] == math.inf and y[1].tolist() == [0.0, 6.0]


@every_kernel
def test_denormals_count(kernel):
    dtype = DTYPES[kernel["value"]]
    smallest = torch.finfo(dtype).smallest_normal
    weight = torch.zeros(20, 20, dtype=dtype)
    weight[:, 1] = smallest / 4
    x = torch.ones(9, 20, dtype=dtype)
    packed = pack(weight, kernel["format"])
    for batch in (1, 9):
        y = forward(kernel["isa"], packed, x[:batch])
        assert torch.equal(y, torch.full((batch, 20), smallest / 4, dtype=dtype))


@every_kernel
def test_values_beyond_the_stored_range_become_infinite(kernel):
    dtype = DTYPES[kernel["value"]]
    largest = torch.finfo(dtype).max
    weight = torch.full((20, 20), largest, dtype=dtype)
    x = torch.ones(9, 20, dtype=dtype)
    for batch in (1, 9):
        assert (forward(kernel["isa"], pack(weight, kernel["format"]), x[:batch]) == math.inf).all()


@every_kernel
def test_rounding_to_the_stored_type_is_to_nearest_even(kernel):
    """A product of one term is stored exactly as torch rounds it."""
    dtype = DTYPES[kernel["value"]]
    x = torch.randn(64, 1).to(dtype)
    weight = torch.randn(50, 1).to(dtype)
    exact = x.double() @ weight.double().T
    wide = exact if dtype == torch.float64 else exact.float()
    for batch in (1, 64):
        y = forward(kernel["isa"], pack(weight, kernel["format"]), x[:batch])
        assert torch.equal(y, wide[:batch].to(dtype))


def test_check_product_can_fail():
    x, weight = torch.randn(4, 30), torch.randn(5, 30)
    y = x @ weight.T
    y[2, 3] *= 1 + 1e-4
    with pytest.raises(AssertionError, match="more than rounding"):
        check_product(y, x, weight)
