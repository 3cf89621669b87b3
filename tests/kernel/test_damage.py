"""Damaged and awkwardly placed blobs of every format: refused, or as good as what they unpack to."""

import pytest
from kernel_support import FORMATS, run_ok

every_format = pytest.mark.parametrize("format", FORMATS)

# In a process of its own, as a blob that is wrongly accepted may crash it.
DAMAGED = """
import numpy as np

torch.set_num_threads(1)

def flip(bytes, at, random):
    bytes[at] ^= 1 << int(random.integers(0, 8))

def overwrite(bytes, at, random):
    part = bytes[at : at + int(random.integers(1, 40))]
    part[:] = random.choice([0, 255, part[0], random.integers(0, 256)])

def scramble(bytes, at, random):
    part = bytes[at : at + int(random.integers(1, 40))]
    part[:] = random.integers(0, 256, len(part))

def shift(bytes, at, random):
    bytes[at:-1] = bytes[at + 1 :].copy()

def add_one(bytes, at, random):
    bytes[at] = (int(bytes[at]) + random.choice([1, 255])) % 256

DAMAGES = [flip, flip, add_one, add_one, overwrite, scramble, shift]

def use(blob, shape):
    dense = unpack(blob, torch.empty(shape))
    # Sums of what is neither huge nor infinite can be compared.
    comparable = dense.isfinite().all() and dense.abs().max() < 1e3
    batch = int(random.choice([1, 5, 40]))
    x, grad = torch.randn(batch, shape[1]), torch.randn(batch, shape[0])
    for isa in ISAS:
        y, grad_x = forward(isa, blob, x), backward(isa, blob, grad)
        if comparable:
            check_product(y, x, dense)
            check_product(grad_x, grad, dense.T)

ISAS = [k["isa"] for k in KERNELS if k["format"] == FORMAT and k["value"] == "float32"]
random = np.random.default_rng(0)
torch.manual_seed(0)
refused = accepted = 0
for rows, cols, density in [(40, 70, 0.3), (150, 90, 0.1), (17, 600, 0.02), (64, 64, 1.1)]:
    weight = torch.randn(rows, cols).where(torch.rand(rows, cols) < density, 0.0)
    whole = pack(weight, FORMAT)
    for attempt in range(120):
        blob = whole.clone()
        bytes = blob.numpy()
        damage = DAMAGES[attempt % len(DAMAGES)]
        # The header is small beside the rest.
        first = 0 if attempt % 9 == 0 else 64
        last = 64 if attempt % 9 == 0 else len(bytes) - 1
        damage(bytes, int(random.integers(first, last)), random)
        if attempt % 20 == 0:
            blob = blob[: int(random.integers(0, len(blob)))].clone()
        try:
            validate(blob)
        except ValueError as error:
            refused += 1
            continue
        header = _C.header(blob.data_ptr(), len(blob))
        if (header["format"], header["value"]) != (FORMAT, "float32"):
            continue
        assert header["cols"] <= 2**32  # entries have 32-bit columns
        if header["rows"] * header["cols"] > 10**6:
            continue
        accepted += 1
        use(blob, (header["rows"], header["cols"]))
print(refused > 40 and accepted > 40 or (refused, accepted))
"""


@every_format
def test_damaged_blobs(format):
    """Both ways are taken: much of a blob are values, which may be any."""
    assert run_ok(f"FORMAT = {format!r}\n{DAMAGED}") == "True"


@every_format
def test_lengths(format):
    script = """
whole = pack(torch.eye(40), FORMAT)
room = torch.zeros(len(whole) + 64, dtype=torch.uint8)
room[: len(whole)] = whole
for length in [*range(64), 64, len(whole) - 64, len(whole) - 1, len(whole) + 1, len(whole) + 64]:
    for call in (_C.validate, _C.header):
        try:
            call(room.data_ptr(), length)
        except ValueError as error:
            assert "bytes" in str(error) and f"got {length}" in str(error), error
        else:
            raise AssertionError(length)
"""
    run_ok(f"FORMAT = {format!r}\n{script}")


GUARDED = """
import ctypes, mmap

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def at_edge(tensor):
    '''A copy whose last byte is the last before a page that may not be touched.'''
    size = tensor.numel() * tensor.element_size()
    pages = (size + 4095) // 4096
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, (pages + 1) * 4096, 3, flags, -1, 0)
    assert libc.mprotect(base + pages * 4096, 4096, 0) == 0
    start = base + pages * 4096 - size
    memory = (ctypes.c_uint8 * size).from_address(start)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)

for kernel in KERNELS:
    dtype = DTYPES[kernel["value"]]
    for rows, cols in [(40, 70), (17, 33), (1, 1), (19, 300)]:
        for density in (0.02, 0.5, 1.1):
            weight = torch.randn(rows, cols).where(torch.rand(rows, cols) < density, 0.0).to(dtype)
            packed = at_edge(pack(at_edge(weight), kernel["format"]))
            validate(packed)
            for batch in (1, 3, 9, 35):
                x, grad = torch.randn(batch, cols).to(dtype), torch.randn(batch, rows).to(dtype)
                y = at_edge(torch.empty(batch, rows, dtype=dtype))
                grad_x = at_edge(torch.empty(batch, cols, dtype=dtype))
                bias = at_edge(torch.randn(rows).to(dtype))
                blob = packed.data_ptr(), packed.numel()
                _C.run_kernel(kernel["isa"], *blob, at_edge(x).data_ptr(), cols, batch,
                              bias.data_ptr(), y.data_ptr(), rows, 1)
                _C.run_kernel_transposed(kernel["isa"], *blob, at_edge(grad).data_ptr(), rows,
                                         batch, grad_x.data_ptr(), cols, 1)
            unpack(packed, at_edge(torch.empty(rows, cols, dtype=dtype)))
print("done")
"""


def test_nothing_is_read_or_written_beyond_a_buffer():
    """Every buffer ends at a page that may not be touched."""
    assert run_ok(GUARDED) == "done"
