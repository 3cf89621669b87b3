"""Packing, unpacking and the size of the packed blob."""

import struct

import pytest
import torch
from kernel_support import DTYPES, bits, dense_arguments, pack, unpack, validate

from fxsparse import _C

every_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
SHAPES = [(1, 1), (40, 70), (17, 256), (17, 257), (3, 65537), (300, 1), (0, 5), (5, 0), (700, 900)]


def pruned(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, cols).where(torch.rand(rows, cols) < 0.3, 0.0).to(dtype)


def up_to_64(size: int) -> int:
    return (size + 63) // 64 * 64


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_type
def test_round_trip_keeps_every_bit(dtype, shape):
    weight = pruned(*shape, dtype)
    packed = pack(weight)
    validate(packed)
    assert torch.equal(bits(unpack(packed, torch.empty(shape, dtype=dtype))), bits(weight))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_type
def test_a_transposed_weight_packs_and_unpacks_alike(dtype, shape):
    weight = pruned(*shape, dtype)
    transposed = weight.T.contiguous().T
    assert torch.equal(pack(transposed), pack(weight))
    out = torch.empty(shape[::-1], dtype=dtype).T
    assert torch.equal(bits(unpack(pack(weight), out)), bits(weight))


@every_type
def test_a_part_of_a_larger_weight_packs_alike(dtype):
    whole = pruned(100, 120, dtype)
    part = whole[10:51:2, 5:86:3]
    assert torch.equal(pack(part), pack(part.clone(memory_format=torch.contiguous_format)))


@every_type
def test_special_values_are_kept_and_zeros_lose_their_sign(dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    values = [float("nan"), float("inf"), -float("inf"), tiny, -tiny, 0.0, -0.0, 1.5]
    weight = torch.tensor([values], dtype=dtype)
    bits(weight)[0, 0] += 1  # a NaN with a payload
    assert _C.count_nonzeros(*dense_arguments(weight)) == 6
    expected = weight.clone()
    expected[0, 6] = 0.0
    assert torch.equal(bits(unpack(pack(weight), torch.empty_like(weight))), bits(expected))


@every_type
@pytest.mark.parametrize("layout", ["rows", "columns", "neither"])
def test_count_nonzeros(dtype, layout):
    weight = pruned(999, 1003, dtype)  # large enough for several threads
    expected = int(weight.count_nonzero())
    if layout == "columns":
        weight = weight.T.contiguous().T
    if layout == "neither":
        weight = torch.stack([weight, torch.ones_like(weight)], dim=-1)[..., 0]
    assert _C.count_nonzeros(*dense_arguments(weight)) == expected


@every_type
def test_layout(dtype):
    """The file format, written down once more: readers of old files rely on it."""
    weight = torch.zeros(3, 300, dtype=dtype)
    weight[0, 7], weight[0, 299], weight[2, 256] = 1.0, 2.0, -3.0
    packed = bytes(pack(weight, flags=1).tolist())
    code = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}[dtype]
    header = struct.pack("<8sIHBBB3xI3Q2Q", b"fxsparse", 1, 1, code, 2, 4, 1, 3, 300, 3, 0, 0)
    offsets = struct.pack("<4I", 0, 2, 2, 3).ljust(64, b"\0")
    indices = struct.pack("<3H", 7, 299, 256).ljust(64, b"\0")
    values = bytes(torch.tensor([1.0, 2.0, -3.0], dtype=dtype).view(torch.uint8).tolist())
    assert packed == header + offsets + indices + values.ljust(64, b"\0")


@pytest.mark.parametrize("value, size", [("float32", 4), ("float64", 8), ("bfloat16", 2)])
@pytest.mark.parametrize(
    "rows, cols, nonzeros, index, offset",
    [
        (10, 256, 100, 1, 4),
        (10, 257, 100, 2, 4),
        (10, 65536, 100, 2, 4),
        (10, 65537, 100, 4, 4),
        (100_000, 100_000, 2**31 + 5, 4, 4),
        (100_000, 60_000, 2**32 - 1, 2, 4),
        (100_000, 60_000, 2**32, 2, 8),
        (2**31, 2**31, 2**40, 4, 8),
    ],
)
def test_packed_bytes(rows, cols, nonzeros, index, offset, value, size):
    expected = 64 + up_to_64((rows + 1) * offset) + up_to_64(nonzeros * index)
    expected += up_to_64(nonzeros * size)
    assert _C.packed_bytes("csr", rows, cols, nonzeros, value) == expected


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("csr", 2**62, 2, 2**62, "float64"), "expected a length below 2.63 bytes"),
        (("csr", 2**63 - 1, 1, 5, "float32"), "expected a length below 2.63 bytes"),
        (("csr", 2, 2**32 + 1, 5, "float32"), r"expected at most 2.32 columns, got 4294967297"),
        (("csr", 3, 4, 13, "float32"), r"expected at most rows x cols \(3 x 4\), got 13"),
        (("csr", -3, 4, 0, "float32"), "expected sizes of zero or more, got rows -3"),
        (("coo", 3, 4, 0, "float32"), "format: expected csr, got coo"),
        (("csr", 3, 4, 0, "int8"), "value type: expected float32, .* got int8"),
    ],
)
def test_packed_bytes_refuses(arguments, text):
    with pytest.raises(ValueError, match=text):
        _C.packed_bytes(*arguments)


def test_pack_refuses_an_output_of_another_size():
    weight = pruned(40, 70, torch.float32)
    packed = pack(weight)
    with pytest.raises(ValueError, match=f"expected an output of {packed.numel()} bytes"):
        _C.pack(*dense_arguments(weight), "csr", 0, packed.data_ptr(), packed.numel() - 64)


def test_pack_writes_nothing_beyond_its_output():
    weight = pruned(700, 900, torch.float32)
    packed = pack(weight)
    room = torch.full((packed.numel() + 128,), 0x5A, dtype=torch.uint8)
    middle = room[64:-64]
    _C.pack(*dense_arguments(weight), "csr", 0, middle.data_ptr(), middle.numel())
    assert torch.equal(middle, packed)
    assert (room[:64] == 0x5A).all() and (room[-64:] == 0x5A).all()


# A weight that somebody writes to while it is packed: here pack itself, whose output overlaps it.
CHANGED = "the weight changed while it was packed"


def test_pack_refuses_a_weight_that_gains_nonzeros():
    room = torch.full((64 + 64 + 64,), 0.0)
    weight = room[:64].view(8, 8)  # all zeros until the header is written there
    size = _C.packed_bytes("csr", 8, 8, 0, "float32")
    end = room.view(torch.uint8)[size:]
    with pytest.raises(ValueError, match=CHANGED):
        _C.pack(*dense_arguments(weight), "csr", 0, room.data_ptr(), size)
    assert (end == 0).all()


@pytest.mark.parametrize("strides", [(1, 1), (1, 2)], ids=["rows", "columns"])
def test_pack_refuses_a_weight_that_loses_nonzeros(strides):
    room = torch.zeros(64)
    room[16] = 1.0  # where the first offset, a zero, is written after the nonzeros are counted
    size = _C.packed_bytes("csr", 1, 1, 1, "float32")
    with pytest.raises(ValueError, match=CHANGED):
        _C.pack(room[16:].data_ptr(), 1, 1, *strides, "float32", "csr", 0, room.data_ptr(), size)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_packing_is_the_same_on_any_number_of_threads(threads, num_threads):
    weight = pruned(997, 1013, torch.float32)
    num_threads(1)
    expected = pack(weight)
    num_threads(threads)
    for layout in (weight, weight.T.contiguous().T):
        assert torch.equal(pack(layout), expected)


@pytest.mark.parametrize("flags", range(8))
def test_header(flags):
    weight = pruned(40, 70, torch.float16)
    packed = pack(weight, flags=flags)
    assert _C.header(packed.data_ptr(), packed.numel()) == {
        "version": 1,
        "format": "csr",
        "value": "float16",
        "rows": 40,
        "cols": 70,
        "nnz": int(weight.count_nonzero()),
        "transposed": bool(flags & 1),
        "is_buffer": bool(flags & 2),
        "requires_grad": bool(flags & 4),
    }
