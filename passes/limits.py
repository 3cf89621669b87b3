"""The numbers that decide, in one place, each with where it came from."""

from __future__ import annotations

import torch

from fxsparse.packing import DTYPES, packed_bytes

#: The packed form of a weight. More forms come with more formats; then they are chosen here.
FORMAT = "csr"

#: Weights with fewer elements than this lie so close to the cost of a call that speed is not judged.
SPEED_MATTERS = 16384

#: Sparsity from which the CSR kernel is not slower than dense, by rows multiplied at once: the
#: first limit whose batch is at least the hint holds.
BREAK_EVEN: tuple[tuple[float, float], ...] = ((1, 0.75), (8, 0.80), (float("inf"), 0.80))


def smallest_sparsity(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """The sparsity from which the packed form of a weight is smaller than its dense form."""
    if dtype not in DTYPES or 0 in shape:
        return 1.0
    elements = shape[0] * shape[1]
    dense = elements * dtype.itemsize
    low, high = 0, elements
    while low < high:
        middle = (low + high + 1) // 2
        if packed_bytes(shape, middle, dtype, FORMAT) < dense:
            low = middle
        else:
            high = middle - 1
    return 1 - low / elements


def break_even_sparsity(batch: int | None) -> float:
    """The sparsity from which a multiply of ``batch`` rows (None: any number) is not slower than dense."""
    if batch is None:
        return max(limit for _, limit in BREAK_EVEN)
    return next(limit for most, limit in BREAK_EVEN if batch <= most)
