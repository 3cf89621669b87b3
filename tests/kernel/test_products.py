"""Every kernel of the table against the dense product in float64, over named relations of shapes."""

import functools

import pytest
import torch
from kernel_support import (
    DTYPES,
    FORMATS,
    KERNEL_IDS,
    KERNELS,
    backward,
    bits,
    check_product,
    forward,
    pack,
)

from fxsparse import _C


def scattered(rows: int, cols: int, density: float = 0.2) -> torch.Tensor:
    return torch.randn(rows, cols, dtype=torch.float64) * (torch.rand(rows, cols) < density)


def skewed(rows: int, cols: int) -> torch.Tensor:
    """Row r keeps about r / rows of its entries: chunks of equal rows would be unequal work."""
    keep = torch.rand(rows, cols) < torch.linspace(0, 1, rows)[:, None]
    return torch.randn(rows, cols, dtype=torch.float64) * keep


def with_row(rows: int, cols: int, row: int, value: float | None) -> torch.Tensor:
    weight = scattered(rows, cols)
    weight[row] = torch.randn(cols) + 3 if value is None else value
    return weight


def single_column(rows: int, cols: int) -> torch.Tensor:
    weight = torch.zeros(rows, cols, dtype=torch.float64)
    weight[:, cols - 1] = torch.randn(rows)
    return weight


# name: (weight, batch). The widest vector has 16 lanes, a panel at most 4 vectors, a tile 16 rows.
RELATIONS = {
    "one_row_batch": lambda: (scattered(40, 70), 1),
    "two_row_batch": lambda: (scattered(40, 70), 2),
    "batch_eq_lanes": lambda: (scattered(40, 70), 16),
    "batch_not_multiple_of_lanes": lambda: (scattered(40, 70), 11),
    "three_vectors": lambda: (scattered(40, 70), 24),
    "panel_full": lambda: (scattered(48, 64), 64),
    "one_row_after_panels": lambda: (scattered(40, 70), 65),
    "one_row_after_a_panel_of_one_vector": lambda: (scattered(2, 30000, 0.02), 17),
    "several_panels": lambda: (scattered(33, 50), 197),
    "empty_batch": lambda: (scattered(40, 70), 0),
    "k_eq_1": lambda: (scattered(40, 1, 0.5), 9),
    "n_eq_1": lambda: (scattered(1, 70), 9),
    "one_by_one": lambda: (scattered(1, 1, 1.0), 9),
    "k_eq_0": lambda: (scattered(40, 0), 9),
    "n_eq_0": lambda: (scattered(0, 70), 9),
    "k_multiple_of_lanes": lambda: (scattered(64, 128), 9),
    "k_not_multiple_of_lanes": lambda: (scattered(64, 131), 9),
    "n_not_multiple_of_tile": lambda: (scattered(50, 64), 9),
    "k_eq_256": lambda: (scattered(20, 256), 9),
    "k_gt_256": lambda: (scattered(20, 257), 9),
    "k_eq_65536": lambda: (scattered(3, 65536, 0.01), 3),
    "k_gt_65536": lambda: (scattered(3, 65543, 0.01), 3),
    "k_gt_65536_one_row": lambda: (scattered(3, 65543, 0.01), 1),
    "all_zero_row": lambda: (with_row(40, 70, 7, 0.0), 9),
    "all_zero_weight": lambda: (scattered(40, 70, 0.0), 9),
    "dense_row": lambda: (with_row(40, 70, 7, None), 9),
    "dense_weight": lambda: (scattered(40, 70, 1.1), 9),
    "single_column": lambda: (single_column(40, 70), 9),
    "skewed_rows": lambda: (skewed(100, 120), 9),
    "skewed_rows_one_row": lambda: (skewed(100, 120), 1),
}


@functools.cache
def relation_of(name: str) -> tuple[torch.Tensor, int]:
    """In float64, for all kernels: to make the wide ones takes longer than to multiply them."""
    return RELATIONS[name]()


every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=KERNEL_IDS)


@pytest.mark.parametrize("relation", RELATIONS)
@every_kernel
def test_forward(kernel, relation):
    dtype = DTYPES[kernel["value"]]
    weight, batch = relation_of(relation)
    weight, x = weight.to(dtype), torch.randn(batch, weight.shape[1]).to(dtype)
    bias = torch.randn(len(weight)).to(dtype)
    packed = pack(weight, kernel["format"])

    check_product(forward(kernel["isa"], packed, x), x, weight)
    check_product(forward(kernel["isa"], packed, x, bias), x, weight, bias)


@pytest.mark.parametrize("relation", RELATIONS)
@every_kernel
def test_backward(kernel, relation):
    dtype = DTYPES[kernel["value"]]
    weight, batch = relation_of(relation)
    weight, grad = weight.to(dtype), torch.randn(batch, len(weight)).to(dtype)

    got = backward(kernel["isa"], pack(weight, kernel["format"]), grad)

    check_product(got, grad, weight.T)


@every_kernel
def test_all_zero_rows_give_exactly_the_bias(kernel):
    dtype = DTYPES[kernel["value"]]
    bias = torch.randn(40).to(dtype)
    packed = pack(torch.zeros(40, 30, dtype=dtype), kernel["format"])
    for batch in (1, 9):
        x = torch.randn(batch, 30).to(dtype)
        assert torch.equal(forward(kernel["isa"], packed, x, bias), bias.expand(batch, 40))
        assert torch.equal(forward(kernel["isa"], packed, x), torch.zeros(batch, 40, dtype=dtype))


@every_kernel
def test_rows_of_x_may_be_strided(kernel):
    dtype = DTYPES[kernel["value"]]
    weight = scattered(40, 70).to(dtype)
    wide = torch.full((13, 100), float("nan")).to(dtype)
    x = wide[:, 10:80]
    x.copy_(torch.randn(13, 70))
    packed = pack(weight, kernel["format"])
    for rows in (x, x[:1], x[::3]):
        check_product(forward(kernel["isa"], packed, rows), rows, weight)


@every_kernel
def test_any_number_of_threads_gives_the_same_bits(kernel, num_threads):
    num_threads(8)
    dtype = DTYPES[kernel["value"]]
    weight = torch.cat([skewed(200, 900), scattered(203, 900, 0.6)]).to(dtype)
    packed = pack(weight, kernel["format"])
    for batch in (1, 7, 40):
        x, grad = torch.randn(batch, 900).to(dtype), torch.randn(batch, 403).to(dtype)
        y, grad_x = forward(kernel["isa"], packed, x), backward(kernel["isa"], packed, grad)
        for threads in (2, 5):
            assert torch.equal(bits(forward(kernel["isa"], packed, x, threads=threads)), bits(y))
            assert torch.equal(
                bits(backward(kernel["isa"], packed, grad, threads=threads)), bits(grad_x)
            )


@every_kernel
def test_the_result_of_a_batch_does_not_depend_on_where_the_blob_lies(kernel):
    """A mapped file may put it at any address."""
    dtype = DTYPES[kernel["value"]]
    weight, x = scattered(40, 70).to(dtype), torch.randn(9, 70).to(dtype)
    packed = pack(weight, kernel["format"])
    moved = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:]
    moved.copy_(packed)
    for rows in (x, x[:1]):
        assert torch.equal(
            forward(kernel["isa"], moved, rows), forward(kernel["isa"], packed, rows)
        )


def test_every_format_has_generic_kernels_and_every_kernel_all_value_types():
    lines = {(k["format"], k["isa"], k["value"]) for k in _C.kernels()}
    assert {format for format, _, _ in lines} == set(FORMATS)
    isas = {(format, isa) for format, isa, _ in lines}
    assert lines == {(*line, value) for line in isas for value in DTYPES}
    assert isas >= {(format, "generic") for format in FORMATS}


def test_generic_is_usable_everywhere():
    generic = {(k["format"], k["value"]) for k in KERNELS if k["isa"] == "generic"}
    assert generic == {(format, value) for format in FORMATS for value in DTYPES}
