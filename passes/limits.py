"""The numbers that decide, in one place, each with where it came from."""

from __future__ import annotations

import torch

from fxsparse.packing import DTYPES, expected_bytes

#: The packed form of a weight. More forms come with more formats; then they are chosen here.
FORMAT = "csr"

#: Weights with fewer elements than this lie so close to the cost of a call that speed is not judged.
SPEED_MATTERS = 16384

#: Zeros from which the CSR kernel is faster than ``F.linear``, by the rows multiplied at once: the
#: first line whose rows are at least the batch holds. `benchmarks/kernel.py` at 384x384, 768x768,
#: 3072x768 and 4096x4096, one thread, Zen 3 with AVX2, and 5 % for noise: the break-even of the worst
#: shape is .78 for one row, .67 for two, .50 for 4 to 16, .55 for 32, .62 for 512.
BREAK_EVEN_AVX2: tuple[tuple[float, float], ...] = (
    (1, 0.80),
    (3, 0.75),
    (16, 0.60),
    (float("inf"), 0.70),
)

#: The same for other instruction sets and any batch. Measured for the generic kernel (x1.6 at the
#: least); AVX-512 and NEON have not been measured and are taken to be no worse.
BREAK_EVEN_OTHER = 0.90


def smallest_sparsity(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """The sparsity from which the packed form of a weight is smaller than its dense form."""
    if dtype not in DTYPES or 0 in shape:
        return 1.0
    elements = shape[0] * shape[1]
    dense = elements * dtype.itemsize
    low, high = 0, elements
    while low < high:
        middle = (low + high + 1) // 2
        if expected_bytes(shape, middle, dtype, FORMAT) < dense:
            low = middle
        else:
            high = middle - 1
    return 1 - low / elements


def break_even_sparsity(batch: int | None, isa: str) -> float:
    """Zeros from which a multiply of ``batch`` rows (None: any number) is faster than dense."""
    if isa != "avx2":
        return BREAK_EVEN_OTHER
    if batch is None:
        return max(limit for _, limit in BREAK_EVEN_AVX2)
    return next(limit for most, limit in BREAK_EVEN_AVX2 if batch <= most)
