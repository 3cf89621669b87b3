"""A blob in CSR is checked before it is trusted: header, sizes, every offset and index."""

import re

import numpy as np
import pytest
import torch
from kernel_support import pack, validate

from fxsparse import _C

# Byte offsets of the header's fields.
MAGIC, VERSION, FORMAT, VALUE, INDEX_WIDTH, OFFSET_WIDTH = 0, 8, 12, 14, 15, 16
TILES, RESERVED, FLAGS = 17, 19, 20
ROWS, COLS, NONZEROS, EXTENT = 24, 32, 40, 48
OFFSETS = 64


@pytest.fixture
def packed() -> torch.Tensor:
    weight = torch.zeros(40, 70)
    weight[torch.rand(40, 70) < 0.3] = 1.5
    weight[5] = 0
    return pack(weight, "csr")


def field(packed: torch.Tensor, offset: int, dtype: str, count: int = 1) -> np.ndarray:
    """A view of `count` values of the blob; writing to it changes the blob."""
    end = offset + count * np.dtype(dtype).itemsize
    return packed.numpy()[offset:end].view(dtype)


def indices_of(packed: torch.Tensor) -> np.ndarray:
    nonzeros = int(field(packed, NONZEROS, "<u8")[0])
    return field(packed, OFFSETS + 192, "<u1", nonzeros)  # 41 offsets take 164 bytes


def test_a_packed_weight_is_valid(packed):
    validate(packed)


@pytest.mark.parametrize(
    "offset, dtype, value, text",
    [
        (MAGIC, "u1", ord("g"), "packed magic: expected"),
        (VERSION, "<u4", 2, "packed version: expected 1, got 2"),
        (FORMAT, "<u2", 77, "packed format: expected a known format, got 77"),
        (VALUE, "u1", 0, "packed value type: expected 1 to 4, got 0"),
        (VALUE, "u1", 5, "packed value type: expected 1 to 4, got 5"),
        (VALUE, "u1", 2, "packed size: expected"),
        (INDEX_WIDTH, "u1", 2, "packed index width: expected 1 bytes, got 2"),
        (OFFSET_WIDTH, "u1", 8, "packed offset width: expected 4 bytes, got 8"),
        (TILES, "u1", 1, "packed tiles: expected zeros for csr, got 1 0"),
        (TILES + 1, "u1", 1, "packed tiles: expected zeros for csr, got 0 1"),
        (RESERVED, "u1", 1, "packed reserved byte: expected zero, got 1"),
        (FLAGS, "<u4", 32, "packed flags: expected 0 to 31, got 32"),
        (ROWS, "<u8", 56, "packed size: expected"),
        (ROWS, "<u8", 2**63, "expected sizes below 2.63"),
        (ROWS, "<u8", 2**63 - 1, "expected a length below 2.63|packed size: expected"),
        (COLS, "<u8", 257, "packed index width: expected 2 bytes, got 1"),
        (COLS, "<u8", 10, "packed nonzeros: expected at most rows x cols"),
        (NONZEROS, "<u8", 2**40, "packed nonzeros: expected at most rows x cols"),
        (NONZEROS, "<u8", 5, "packed size: expected"),
        (EXTENT, "<u8", 1, "packed extent: expected zeros"),
        (EXTENT + 8, "<u8", 1, "packed extent: expected zeros"),
    ],
)
def test_header_fields(packed, offset, dtype, value, text):
    field(packed, offset, dtype)[0] = value
    for call in (_C.validate, _C.header):
        with pytest.raises(ValueError, match=text):
            call(packed.data_ptr(), packed.numel())


@pytest.mark.parametrize("change", [-64, -1, 1, 64])
def test_length(packed, change):
    room = torch.zeros(packed.numel() + 64, dtype=torch.uint8)
    room[: packed.numel()] = packed
    got = packed.numel() + change
    with pytest.raises(ValueError, match=f"packed size: expected {packed.numel()} .* got {got}"):
        _C.validate(room.data_ptr(), got)


@pytest.mark.parametrize("length", [0, 1, 63])
def test_shorter_than_a_header(packed, length):
    with pytest.raises(ValueError, match=f"expected at least 64 bytes, got {length}"):
        _C.validate(packed.data_ptr(), length)


def test_first_offset(packed):
    field(packed, OFFSETS, "<u4")[0] = 1
    with pytest.raises(ValueError, match=re.escape("csr offsets[0]: expected 0, got 1")):
        validate(packed)


def test_decreasing_offsets(packed):
    offsets = field(packed, OFFSETS, "<u4", 41)
    offsets[20] = offsets[19] - 1
    text = f"csr offsets[20]: expected {offsets[19]} to {offsets[40]} (nonzeros), got {offsets[20]}"
    with pytest.raises(ValueError, match=re.escape(text)):
        validate(packed)


def test_offsets_beyond_the_nonzeros(packed):
    offsets = field(packed, OFFSETS, "<u4", 41)
    offsets[20] = offsets[40] + 1
    with pytest.raises(ValueError, match=re.escape(f"got {offsets[20]}")):
        validate(packed)


def test_last_offset(packed):
    offsets = field(packed, OFFSETS, "<u4", 41)
    offsets[40] -= 1
    with pytest.raises(ValueError, match=re.escape("csr offsets[40]: expected")):
        validate(packed)


@pytest.mark.parametrize("row", [0, 6, 39])
def test_index_beyond_the_columns(packed, row):
    last = field(packed, OFFSETS, "<u4", 41)[row + 1] - 1
    indices_of(packed)[last] = 70
    text = f"csr indices[{last}] (row {row}): expected less than 70 columns"
    with pytest.raises(ValueError, match=re.escape(text)):
        validate(packed)


@pytest.mark.parametrize("step", [0, 1], ids=["equal", "decreasing"])
def test_indices_increase_within_a_row(packed, step):
    first = field(packed, OFFSETS, "<u4", 41)[6]
    indices = indices_of(packed)
    indices[first] = indices[first + 1] + step
    with pytest.raises(ValueError, match=re.escape(f"csr indices[{first + 1}] (row 6)")):
        validate(packed)


def test_the_first_bad_row_is_named_on_any_number_of_threads(num_threads):
    num_threads(8)
    weight = torch.ones(3000, 300)
    packed = pack(weight, "csr")
    indices = field(packed, OFFSETS + 12032, "<u2", 900_000)  # 3001 offsets take 12004 bytes
    indices[300 * 1000 + 17] = indices[300 * 2500 + 9] = 7
    for _ in range(20):
        with pytest.raises(ValueError, match=r"row 1000\)"):
            validate(packed)


def test_values_are_any_bits(packed):
    start = OFFSETS + 192 + (len(indices_of(packed)) + 63) // 64 * 64
    packed[start:] = torch.randint(0, 256, (packed.numel() - start,), dtype=torch.uint8)
    validate(packed)
