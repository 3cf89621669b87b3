"""Which packed form a weight gets, and whether it is expected to be faster than dense.

Sizes come from the formats, times from the measured table ``kernel/op/costs.inc``. The environment
variable ``FXSPARSE_COSTS`` names a table made on another machine by ``benchmarks/calibrate.py``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ._native import _C
from .packing import DTYPES, expected_bytes

#: Weights with fewer elements than this lie so close to the cost of a call that speed is not judged.
SPEED_MATTERS = 16384

#: What a step of a packed recurrent layer costs besides its multiply: steps run in Python, where torch
#: has one call for all. 30 steps of an LSTM of 128 units, on a virtual Sapphire Rapids.
STEP_NS = 40e3

#: A batch hint, or ``prefer="latency"``, may cost this much more than the smallest form.
EXTRA_BYTES = 1.25

#: Without them the fastest is taken of the forms that are the smallest up to this.
SAME_BYTES = 1.02

#: The batch sizes that a weight without a hint must do well at.
ANY_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)

#: The packed forms there are.
FORMATS: tuple[str, ...] = tuple(_C.formats())

#: Those whose rows are read a few at a time; the others unpack up to 256 for one.
ROW_FORMATS: tuple[str, ...] = tuple(format for format in FORMATS if format != "pairs")


@dataclass(frozen=True)
class Choice:
    """A packed form for a weight."""

    format: str
    bytes: int  #: expected, were the nonzeros spread evenly
    speedup: float  #: expected time of the fastest dense multiply over this one's


def choose(
    shape: tuple[int, int],
    nnz: int,
    dtype: torch.dtype,
    *,
    batch_hint: int | None,
    prefer: str,
    by_rows: bool = False,
) -> Choice:
    """The packed form of an ``(out, in)`` weight with ``nnz`` nonzeros; ``by_rows``: rows are looked up.

    With ``batch_hint`` or ``prefer="latency"`` the fastest within :data:`EXTRA_BYTES` of the smallest,
    else the smallest. Without a hint the fastest is the one that gains most at the batch size of
    :data:`ANY_BATCH` where it gains least.
    """
    formats = ROW_FORMATS if by_rows else FORMATS
    sizes = {format: expected_bytes(shape, nnz, dtype, format) for format in formats}
    slack = SAME_BYTES if batch_hint is None and prefer == "memory" else EXTRA_BYTES
    most = min(sizes.values()) * slack
    small = [format for format in formats if sizes[format] <= most]
    best = max(small, key=lambda format: speedup(shape, nnz, format, batch_hint))
    return Choice(best, sizes[best], speedup(shape, nnz, best, batch_hint))


def speedup(
    shape: tuple[int, int], nnz: int, format: str, batch: int | None, call_ns: float = 0
) -> float:
    """Expected time of the fastest dense multiply over that of a packed one (None: the worst batch),
    which costs ``call_ns`` nanoseconds more to call."""
    isa = _C.isa()

    def ratio(rows: int) -> float:
        sparse = _C.expected_ns(isa, format, *shape, nnz, rows) + call_ns
        return _C.expected_ns(isa, "dense", *shape, nnz, rows) / sparse if sparse else 1.0

    return ratio(batch) if batch is not None else min(ratio(rows) for rows in ANY_BATCH)


def slowest_batch(
    shape: tuple[int, int], nnz: int, format: str, call_ns: float = 0
) -> tuple[int, float]:
    """The batch size of :data:`ANY_BATCH` where a packed form gains least, and its speed-up there."""
    return min(
        ((rows, speedup(shape, nnz, format, rows, call_ns)) for rows in ANY_BATCH),
        key=lambda pair: pair[1],
    )


def smallest_sparsity(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """The sparsity from which some packed form of a weight is smaller than its dense form."""
    if dtype not in DTYPES or 0 in shape:
        return 1.0
    elements = shape[0] * shape[1]
    dense = elements * dtype.itemsize
    low, high = 0, elements
    while low < high:
        middle = (low + high + 1) // 2
        if min(expected_bytes(shape, middle, dtype, format) for format in FORMATS) < dense:
            low = middle
        else:
            high = middle - 1
    return 1 - low / elements


def break_even_sparsity(shape: tuple[int, int], batch: int | None, call_ns: float = 0) -> float:
    """The sparsity from which the fastest packed form is expected to beat dense at this batch."""
    elements = shape[0] * shape[1]
    for percent in range(0, 101):
        nnz = round(elements * (1 - percent / 100))
        if max(speedup(shape, nnz, format, batch, call_ns) for format in FORMATS) >= 1:
            return percent / 100
    return 1.0


_LINE = re.compile(r"FXSPARSE_COST\((\w+), (\w+), (\d+), (\d+),\s*([^()]+)\)")


def read_costs(path: str | Path) -> None:
    """Use the measurements of a file that ``benchmarks/calibrate.py`` wrote.

    They replace those of the instruction sets and formats that the file has. ``ValueError`` where the
    file has other lines than these.
    """
    lines = []
    text = Path(path).read_text()
    for isa, format, elements, batch, times in _LINE.findall(text):
        values = [float(value) for value in times.split(",")]
        if len(values) != len(_C.cost_densities):
            raise ValueError(
                f"{path}: expected {len(_C.cost_densities)} times in each line, got {len(values)}"
            )
        lines.append((isa, format, int(elements), int(batch), values))
    if not lines:
        raise ValueError(f"{path}: expected lines of FXSPARSE_COST(...), found none")
    _C.set_costs(lines)


if table := os.environ.get("FXSPARSE_COSTS"):
    try:
        read_costs(table)
    except (OSError, ValueError) as error:
        raise ImportError(
            f"FXSPARSE_COSTS: expected a table of benchmarks/calibrate.py, got {table!r}: {error}"
        ) from error
