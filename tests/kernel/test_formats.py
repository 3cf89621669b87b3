"""Packing and unpacking: what holds for every format, and the bytes of CSR."""

import struct

import pytest
import torch
from kernel_support import (
    DTYPES,
    FORMATS,
    bits,
    dense_arguments,
    describe,
    pack,
    run_ok,
    unpack,
    validate,
)

from fxsparse import _C

every_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
every_format = pytest.mark.parametrize("format", FORMATS)
SHAPES = [(1, 1), (40, 70), (17, 256), (17, 257), (3, 65537), (300, 1), (0, 5), (5, 0), (700, 900)]
HEADER = 64


def pruned(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, cols).where(torch.rand(rows, cols) < 0.3, 0.0).to(dtype)


def up_to_64(size: int) -> int:
    return (size + 63) // 64 * 64


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_type
@every_format
def test_round_trip_keeps_every_bit(format, dtype, shape):
    weight = pruned(*shape, dtype)
    packed = pack(weight, format)
    validate(packed)
    assert torch.equal(bits(unpack(packed, torch.empty(shape, dtype=dtype))), bits(weight))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_type
@every_format
def test_a_transposed_weight_packs_and_unpacks_alike(format, dtype, shape):
    weight = pruned(*shape, dtype)
    transposed = weight.T.contiguous().T
    assert torch.equal(pack(transposed, format), pack(weight, format))
    out = torch.empty(shape[::-1], dtype=dtype).T
    assert torch.equal(bits(unpack(pack(weight, format), out)), bits(weight))


@every_type
@every_format
def test_a_part_of_a_larger_weight_packs_alike(format, dtype):
    whole = pruned(100, 120, dtype)
    part = whole[10:51:2, 5:86:3]
    copy = part.clone(memory_format=torch.contiguous_format)
    assert torch.equal(pack(part, format), pack(copy, format))


@every_format
def test_an_expanded_weight_packs_alike(format):
    """Strides of zero: every row, or every value, is one in memory."""
    row, value = pruned(1, 70, torch.float32), torch.ones(1, 1)
    for weight in (row.expand(40, 70), row.T.expand(70, 40), value.expand(40, 70)):
        copy = weight.clone(memory_format=torch.contiguous_format)
        assert torch.equal(pack(weight, format), pack(copy, format))


@every_type
@every_format
def test_special_values_are_kept_and_zeros_lose_their_sign(format, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    values = [float("nan"), float("inf"), -float("inf"), tiny, -tiny, 0.0, -0.0, 1.5]
    weight = torch.tensor([values], dtype=dtype)
    bits(weight)[0, 0] += 1  # a NaN with a payload
    assert _C.count_nonzeros(*dense_arguments(weight)) == 6
    expected = weight.clone()
    expected[0, 6] = 0.0
    got = unpack(pack(weight, format), torch.empty_like(weight))
    assert torch.equal(bits(got), bits(expected))


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
def test_the_bytes_of_csr(dtype):
    """The file format, written down once more: readers of old files rely on it."""
    weight = torch.zeros(3, 300, dtype=dtype)
    weight[0, 7], weight[0, 299], weight[2, 256] = 1.0, 2.0, -3.0
    packed = bytes(pack(weight, "csr", flags=1).tolist())
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
def test_expected_bytes_of_csr(rows, cols, nonzeros, index, offset, value, size):
    expected = HEADER + up_to_64((rows + 1) * offset) + up_to_64(nonzeros * index)
    expected += up_to_64(nonzeros * size)
    assert _C.expected_bytes("csr", rows, cols, nonzeros, value) == expected


@pytest.mark.parametrize("density", [0.5, 0.1, 0.02])
@every_format
def test_expected_bytes_are_about_those_of_evenly_spread_nonzeros(format, density):
    for rows, cols in ((512, 768), (300, 1000), (1000, 300)):
        weight = torch.randn(rows, cols).where(torch.rand(rows, cols) < density, 0.0)
        size = pack(weight, format).numel()
        nonzeros = int(weight.count_nonzero())
        expected = _C.expected_bytes(format, rows, cols, nonzeros, "float32")
        assert expected == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(
    "sizes, text",
    [
        ((2**62, 2, 2**62, "float64"), "expected a length below 2.63 bytes"),
        ((3, 4, 13, "float32"), r"expected at most rows x cols \(3 x 4\), got 13"),
        ((-3, 4, 0, "float32"), "expected sizes of zero or more, got rows -3"),
        ((3, 4, 0, "int8"), "value type: expected float32, .* got int8"),
    ],
)
@every_format
def test_expected_bytes_refuses(format, sizes, text):
    with pytest.raises(ValueError, match=text):
        _C.expected_bytes(format, *sizes)


def test_expected_bytes_of_csr_refuses_more_columns_than_an_index_holds():
    with pytest.raises(ValueError, match=r"expected at most 2.32 columns, got 4294967297"):
        _C.expected_bytes("csr", 2, 2**32 + 1, 5, "float32")


def test_an_unknown_format_is_named():
    text = f"format: expected one of {', '.join(FORMATS)}, got coo"
    with pytest.raises(ValueError, match=text):
        _C.expected_bytes("coo", 3, 4, 0, "float32")
    with pytest.raises(ValueError, match=text):
        describe(torch.eye(3), "coo")


@every_format
def test_pack_refuses_an_output_of_another_size(format):
    weight = pruned(40, 70, torch.float32)
    header = describe(weight, format)
    packed = pack(weight, format)
    with pytest.raises(ValueError, match=f"expected an output of {packed.numel()} bytes"):
        _C.pack(*dense_arguments(weight), header, packed.data_ptr(), packed.numel() - 64)


@every_format
def test_pack_refuses_the_header_of_another_weight(format):
    """Of other sizes or type; nothing is written."""
    weight = pruned(40, 70, torch.float32)
    room = torch.zeros(len(pack(weight, format)), dtype=torch.uint8)
    for other in (pruned(41, 70, torch.float32), weight.bfloat16()):
        with pytest.raises(ValueError, match="expected a weight of"):
            _C.pack(*dense_arguments(weight), describe(other, format), room.data_ptr(), len(room))
    assert (room == 0).all()


@pytest.mark.parametrize("header", [b"", bytes(63), bytes(64), b"fxsparse" + bytes(56)])
def test_a_header_that_is_none_is_refused(header):
    weight = pruned(4, 7, torch.float32)
    with pytest.raises(ValueError, match="header: expected"):
        _C.packed_bytes(header)
    with pytest.raises(ValueError, match="header: expected"):
        _C.pack(*dense_arguments(weight), header, 0, 0)


@every_format
def test_pack_writes_nothing_beyond_its_output(format):
    weight = pruned(700, 900, torch.float32)
    packed, header = pack(weight, format), describe(weight, format)
    room = torch.full((packed.numel() + 128,), 0x5A, dtype=torch.uint8)
    middle = room[64:-64]
    _C.pack(*dense_arguments(weight), header, middle.data_ptr(), middle.numel())
    assert torch.equal(middle, packed)
    assert (room[:64] == 0x5A).all() and (room[-64:] == 0x5A).all()


def entry_moved(weight):
    """Within its row: as many nonzeros as before, in other places."""
    row = weight[3]
    row[row.nonzero()[:30]] = 0.0
    row[(row == 0).nonzero()[-30:]] = 1.0


CHANGES = {
    "gains a nonzero": lambda w: w.__setitem__((w == 0).nonzero()[0].tolist(), 1.0),
    "gains many": lambda w: w.fill_(1.0),
    "loses one": lambda w: w.__setitem__(w.nonzero()[-1].tolist(), 0.0),
    "loses all": lambda w: w.fill_(0.0),
    "swaps rows": lambda w: w.copy_(w.flip(0)),
    "swaps columns": lambda w: w.copy_(w.flip(1)),
    "moves entries": entry_moved,
}


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("change", CHANGES)
@every_format
def test_a_weight_that_changes_before_it_is_packed(format, change, order):
    """Refused, or else packed as what it is now; nothing is written beyond the output."""
    weight = pruned(300, 300, torch.float32)
    weight *= torch.linspace(0, 1, 300)[:, None] > torch.rand(300, 300)  # rows differ
    if order == "columns":
        weight = weight.T.contiguous().T
    header = describe(weight, format)
    nonzeros = weight.count_nonzero()
    CHANGES[change](weight)
    size = _C.packed_bytes(header)
    room = torch.full((size + 128,), 0x5A, dtype=torch.uint8)
    packed = room[64:-64]
    try:
        _C.pack(*dense_arguments(weight), header, packed.data_ptr(), size)
    except ValueError as error:
        assert "the weight changed while it was packed" in str(error)
    else:
        assert weight.count_nonzero() == nonzeros
        validate(packed)
        assert torch.equal(unpack(packed, torch.empty_like(weight)), weight)
    assert (room[:64] == 0x5A).all() and (room[-64:] == 0x5A).all()


CHANGING = """
import threading
torch.manual_seed(0)
weight = torch.randn(500, 500).where(torch.rand(500, 500) < 0.3, 0.0)
stop = threading.Event()

def change():
    while not stop.is_set():
        row = torch.randint(500, ())
        weight[row] = torch.randn(500).where(torch.rand(500) < torch.rand(()), 0.0)

other = threading.Thread(target=change)
other.start()
try:
    for i in range(60):
        strides = (500, 1) if i % 2 else (1, 500)
        arguments = (weight.data_ptr(), 500, 500, *strides, "float32")
        try:
            header = _C.describe(*arguments, FORMAT, 0)
            size = _C.packed_bytes(header)
        except ValueError:  # parts of the header are of different times
            continue
        room = torch.full((size + 128,), 0x5A, dtype=torch.uint8)
        packed = room[64:-64]
        try:
            _C.pack(*arguments, header, packed.data_ptr(), size)
        except ValueError as error:
            assert "the weight changed while it was packed" in str(error), error
        else:
            _C.validate(packed.data_ptr(), size)
        assert (room[:64] == 0x5A).all() and (room[-64:] == 0x5A).all()
finally:
    stop.set()
    other.join()
print("done")
"""


@every_format
def test_a_weight_that_another_thread_changes_while_it_is_packed(format):
    assert run_ok(f"FORMAT = {format!r}\n{CHANGING}") == "done"


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@every_format
def test_packing_is_the_same_on_any_number_of_threads(format, threads, num_threads):
    weight = pruned(997, 1013, torch.float32)
    num_threads(1)
    expected = pack(weight, format)
    num_threads(threads)
    for layout in (weight, weight.T.contiguous().T):
        assert torch.equal(pack(layout, format), expected)


@pytest.mark.parametrize("flags", [*range(8), 8, 17, 31])
@every_format
def test_header(format, flags):
    weight = pruned(40, 70, torch.float16)
    packed = pack(weight, format, flags)
    assert packed[:HEADER].numpy().tobytes() == describe(weight, format, flags)
    assert _C.header(packed.data_ptr(), packed.numel()) == {
        "version": 1,
        "format": format,
        "value": "float16",
        "rows": 40,
        "cols": 70,
        "nnz": int(weight.count_nonzero()),
        "transposed": bool(flags & 1),
        "is_buffer": bool(flags & 2),
        "requires_grad": bool(flags & 4),
        "trailing": flags >> 3,
    }


@every_format
def test_unknown_flags_are_refused(format):
    with pytest.raises(ValueError, match="packed flags: expected 0 to 31, got 32"):
        describe(torch.eye(3), format, 32)
