"""The packed format `pairs`: its bytes, round trips, and damaged blobs that are refused."""

import numpy as np
import pytest
import torch
from kernel_support import DTYPES, bits, pack, unpack, validate

from fxsparse import _C

EXTENT = 48
TILES = 64


def section(packed: torch.Tensor, start: int, dtype: str, count: int) -> np.ndarray:
    """A view of the blob; writing to it changes the blob."""
    return packed.numpy()[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def scattered(rows: int, cols: int, density: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, cols) * (torch.rand(rows, cols) < density)).to(dtype)


@pytest.fixture
def three_rows() -> torch.Tensor:
    """Rows 0 and 1 are paired: columns 1 and 2 are shared, and one other of each. Row 2 is alone."""
    weight = torch.zeros(3, 70)
    weight[0, [1, 2, 69]] = torch.tensor([1.0, 2.0, 3.0])
    weight[1, [1, 2, 5]] = torch.tensor([4.0, 5.0, 6.0])
    weight[2, 9] = 7.0
    return pack(weight, "pairs")


def test_the_bytes(three_rows):
    # One tile of 128 columns, so that its numbers are all there is.
    assert section(three_rows, TILES, "<u4", 4).tolist() == [0, 0, 8, 5]
    assert section(three_rows, TILES + 64, "u1", 12).tolist() == [
        *(0, 1, 2, 0, 1, 0),  # rows 0 and 1, two shared columns, one single one each
        *(2, 3, 1, 0, 0, 0),  # row 2, and the one that does not exist
    ]
    assert section(three_rows, TILES + 128, "u1", 5).tolist() == [1, 2, 69, 5, 9]
    assert section(three_rows, TILES + 192, "<f4", 8).tolist() == [1, 4, 2, 5, 3, 6, 7, 0]
    assert section(three_rows, EXTENT, "<u8", 2).tolist() == [5, 8]


def test_the_longer_row_of_a_pair_keeps_its_rest_as_shared_columns():
    weight = torch.zeros(2, 40)
    weight[0, :3] = 1.0
    weight[1, 7] = 2.0
    packed = pack(weight, "pairs")
    assert section(packed, TILES + 64, "u1", 6).tolist() == [0, 1, 2, 0, 1, 0]
    assert section(packed, TILES + 192, "<f4", 6).tolist() == [1, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("rows, cols", [(1, 1), (3, 64), (129, 65), (255, 300), (1600, 257)])
def test_round_trip(rows, cols, density, transposed, dtype):
    weight = scattered(rows, cols, density, dtype)
    weight[0, 0] = -0.0
    source = weight.t().contiguous().t() if transposed else weight
    packed = pack(source, "pairs")
    validate(packed)
    back = unpack(packed, torch.full_like(weight, 7))
    assert torch.equal(bits(back), bits(torch.where(weight == 0, 0.0, weight).to(dtype)))


def test_equal_weights_are_equal_blobs():
    weight = scattered(300, 300, 0.2, torch.float32)
    assert torch.equal(pack(weight, "pairs"), pack(weight.t().contiguous().t(), "pairs"))


@pytest.mark.parametrize("density, most", [(0.5, 2.45), (0.3, 1.52), (0.2, 1.03), (0.1, 0.535)])
def test_bytes_per_weight(density, most):
    rows = cols = 768
    weight = scattered(rows, cols, density, torch.float32)
    packed = pack(weight, "pairs")
    assert packed.numel() / weight.numel() < most
    expected = _C.expected_bytes("pairs", rows, cols, int(weight.count_nonzero()), "float32")
    assert packed.numel() == pytest.approx(expected, rel=0.02)


DAMAGES = {
    "tile_rows": (17, "u1", 9, "packed tile rows: expected 2^4 to 2^8"),
    "tile_cols": (18, "u1", 5, "packed tile columns: expected 2^6 to 2^8"),
    "index_width": (15, "u1", 2, "packed index width: expected 1 byte"),
    "offset_width": (16, "u1", 8, "packed offset width: expected 4 bytes"),
    "odd_values": (EXTENT + 8, "<u8", 9, "packed extent: expected an even number of values"),
    "too_many_values": (EXTENT + 8, "<u8", 16, "packed extent: expected an even number of values"),
    "too_many_indices": (EXTENT, "<u8", 9, "packed extent: expected 4 to 8 index bytes"),
    "first_tile": (TILES, "<u4", 2, "pairs tiles[0]: expected value 0 and index 0"),
    "last_tile": (TILES + 8, "<u4", 6, "pairs tiles[1]: expected value 8 and index 5"),
    "row_twice": (TILES + 65, "u1", 0, "pairs headers[0]: expected each row below 4 once"),
    "row_beyond": (TILES + 70, "u1", 3, "pairs headers[1]: expected each row below 3 once"),
    "count": (TILES + 66, "<u2", 3, "pairs tiles[1]: expected value 10 and index 6"),
    "many_columns": (TILES + 66, "<u2", 70, "pairs headers[0]: expected at most 70 columns"),
    "single_of_a_row_alone": (TILES + 74, "<u2", 1, "pairs headers[1]: expected no single columns"),
    "column_beyond": (TILES + 130, "u1", 70, "pairs indices[2]: expected less than 70 columns"),
    "columns_not_increasing": (TILES + 129, "u1", 1, "pairs indices[1]: expected less than"),
    "column_twice": (TILES + 131, "u1", 2, "pairs indices[3]: expected less than"),
}


@pytest.mark.parametrize("offset, dtype, value, text", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_refused(three_rows, offset, dtype, value, text):
    section(three_rows, offset, dtype, 1)[0] = value
    with pytest.raises(ValueError) as error:
        validate(three_rows)
    assert text in str(error.value)


def test_values_are_any_bits(three_rows):
    section(three_rows, TILES + 192, "<u4", 8)[:] = 0xFFFFFFFF
    validate(three_rows)


def test_a_weight_that_changes_is_refused():
    weight = scattered(300, 300, 0.2, torch.float32)
    header = _C.describe(weight.data_ptr(), *weight.shape, *weight.stride(), "float32", "pairs", 0)
    weight[17, weight[17].nonzero()[0]] = 0
    out = torch.zeros(_C.packed_bytes(header), dtype=torch.uint8)
    with pytest.raises(ValueError, match="the weight changed while it was packed"):
        _C.pack(
            *(weight.data_ptr(), *weight.shape, *weight.stride(), "float32"),
            *(header, out.data_ptr(), out.numel()),
        )
