"""A stack of packed matrices: its bytes, what is refused, and what a module that holds one may load."""

import copy
import struct

import pytest
import torch
from pruned import sparse_weight
from torch import nn

import fxsparse
from fxsparse.cost import FORMATS
from fxsparse.packing import blocks_of, describe, header, pack, packed_bytes, unpack, validate
from fxsparse.stack import is_stack

E, N, K = 3, 40, 24


def experts(sparsity=0.8, dtype=torch.float32, blocks=E):
    return sparse_weight(blocks * N, K, sparsity, dtype).view(blocks, N, K)


class Experts(nn.Module):
    """Reads its 3-D weight in a forward that cannot be traced."""

    def __init__(self, weight):
        super().__init__()
        self.w = nn.Parameter(weight)

    def forward(self, x, scale=None):
        y = torch.bmm(x, self.w.transpose(1, 2))
        return y if scale is None else y * scale


def compiled(weight=None, **options):
    model = Experts(experts() if weight is None else weight)
    return fxsparse.compile(model, min_elements=0, **options)


def words(stack, begin, count):
    return struct.unpack(f"<{count}q", bytes(stack[8 * begin : 8 * (begin + count)].tolist()))


def test_its_bytes():
    weight = experts()
    weight[1] = 0
    stack = pack(weight, format="csr", blocks=E)
    parts = [pack(matrix, format="csr") for matrix in weight]
    assert bytes(stack[:8].tolist()) == b"fxstack1"
    assert words(stack, 1, 3) == (E, 0, stack.numel())
    offsets = words(stack, 4, E + 1)
    assert offsets[0] == 64 and offsets[-1] == stack.numel()
    assert not stack[8 * (5 + E) : 64].any()
    for part, begin, end in zip(parts, offsets, offsets[1:]):
        assert torch.equal(stack[begin:end], part)
    assert [p.numel() for p in blocks_of(stack)] == [p.numel() for p in parts]
    assert stack.numel() == packed_bytes(describe(weight, "csr", blocks=E), stacked=True)
    assert words(pack(weight[0], format="csr", blocks=4), 1, 2) == (4, 1)


def test_a_table_longer_than_a_line():
    weight = experts(blocks=20)
    stack = pack(weight, format="csr", blocks=20)
    assert words(stack, 4, 1) == (256,)
    assert torch.equal(unpack(stack), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["experts", "transposed experts", "cut", "one"])
@pytest.mark.parametrize("format", FORMATS)
def test_to_dense_is_bit_for_bit(dtype, form, format):
    weight = experts(dtype=dtype)
    weight[0, 0, :3] = torch.tensor([1e-7, float("nan"), -0.0], dtype=dtype)
    how = {"blocks": E, "transposed": form == "transposed experts"}
    if form == "cut":
        weight = weight.view(E * N, K)
    elif form == "one":
        weight, how = weight[:1], {"blocks": 1}
    stack = pack(weight, format=format, **how)
    head = validate(stack)
    assert is_stack(stack) and head == header(stack)
    assert (head.blocks, head.flat, head.dense_shape) == (
        how["blocks"],
        form == "cut",
        weight.shape,
    )
    assert head.nnz == int((weight != 0).sum()) and head.format == format
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    expected = torch.where(weight == 0, 0.0, weight).to(dtype)  # -0.0 comes back as 0.0
    assert torch.equal(unpack(stack).view(ints), expected.view(ints))


def test_strided_and_empty_weights():
    weight = experts()
    for strided in (weight.mT.contiguous().mT, weight[:, ::2], weight.flip(0)):
        assert torch.equal(unpack(pack(strided, format="csr", blocks=E)), strided)
    empty = torch.zeros(E, 0, K)
    assert unpack(pack(empty, format="csr", blocks=E)).shape == (E, 0, K)


def damaged(word, value):
    def damage(stack):
        stack = stack.clone()
        stack[8 * word : 8 * word + 8] = torch.tensor(
            list(struct.pack("<q", value)), dtype=torch.uint8
        )
        return stack

    return damage


def _swapped(stack):
    """With a block of another shape in the middle, and offsets that fit."""
    parts = [pack(sparse_weight(*shape), format="csr") for shape in ((N, K), (K, N), (N, K))]
    return _stack_of(parts)


def _mixed(**changes):
    def mixed(stack):
        how = {"dtype": torch.float32, "format": "csr", "transposed": False, **changes}
        dtype = how.pop("dtype")
        parts = [pack(sparse_weight(N, K), format="csr") for _ in range(2)]
        if how["transposed"]:
            parts.append(pack(sparse_weight(K, N, dtype=dtype), **how))
        else:
            parts.append(pack(sparse_weight(N, K, dtype=dtype), **how))
        return _stack_of(parts)

    return mixed


def _stack_of(parts, flat=0):
    offsets = [64]
    for part in parts:
        offsets.append(offsets[-1] + part.numel())
    head = b"fxstack1" + struct.pack("<7q", len(parts), flat, offsets[-1], *offsets)
    return torch.cat([torch.tensor(list(head), dtype=torch.uint8), *parts])


def _flat(stack):
    return damaged(2, 1)(pack(experts(), format="csr", blocks=E, transposed=True))


def _with_bad_column(stack):
    stack = stack.clone()
    last = blocks_of(stack)[-1]
    last[96:] = 255
    return stack


DAMAGE = {
    "magic": (damaged(0, 0), "magic|packed"),
    "no blocks": (damaged(1, 0), "blocks do not fit"),
    "negative blocks": (damaged(1, -1), "blocks do not fit"),
    "more blocks": (damaged(1, E + 1), "offsets"),
    "fewer blocks": (damaged(1, E - 1), "offsets"),
    "blocks that overflow": (damaged(1, 2**61), "blocks do not fit"),
    "flag": (damaged(2, 2), "flag of row blocks as 0 or 1, got 2"),
    "size": (damaged(3, 64), "expected 64 bytes"),
    "first offset": (damaged(4, 0), "expected offsets from 64"),
    "offset past the end": (damaged(5, 2**40), "increasing multiples of 64"),
    "unaligned offset": (damaged(5, 65), "increasing multiples of 64"),
    "negative offset": (damaged(5, -64), "increasing multiples of 64"),
    "offset between": (damaged(5, 128), "packed"),
    "last offset": (damaged(7, 64), "offsets"),
    "truncated": (lambda s: s[:-64], "bytes"),
    "truncated table": (lambda s: s[:40], "packed"),
    "header alone": (lambda s: s[:32], "packed"),
    "longer": (lambda s: torch.cat([s, s[:64]]), "bytes"),
    "a block of another shape": (_swapped, "blocks that agree.*at block 1"),
    "a block of another dtype": (_mixed(dtype=torch.float64), "blocks that agree.*at block 2"),
    "a block of another format": (_mixed(format="bitmap"), "blocks that agree.*at block 2"),
    "a transposed block": (_mixed(transposed=True), "blocks that agree.*at block 2"),
    "transposed row blocks": (
        _flat,
        "row blocks that are not transposed",
    ),
    "a damaged block": (_with_bad_column, "expected"),
    "another dtype": (lambda s: s.to(torch.int16), "uint8"),
    "2-D": (lambda s: s.view(1, -1), "1-D"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name):
    damage, message = DAMAGE[name]
    weight = experts()
    stack = pack(weight, format="csr", blocks=E)
    bad = damage(stack)
    with pytest.raises(ValueError, match=message):
        validate(bad)
    sparse = compiled(weight)
    x = torch.randn(E, 2, K)
    expected = sparse(x)
    with pytest.raises(RuntimeError, match="w_packed"):
        sparse.load_state_dict({"w_packed": bad})
    assert torch.equal(sparse(x), expected)


def test_every_single_byte_of_the_table_is_checked_or_read_safely():
    stack = pack(experts(), format="csr", blocks=E)
    for at in range(8 * (5 + E)):
        bad = stack.clone()
        bad[at] ^= 255
        with pytest.raises(ValueError, match="packed"):
            validate(bad)


def test_a_stack_in_the_middle_of_a_buffer():
    stack = pack(experts(), format="csr", blocks=E)
    for shift in (1, 8, 64):
        moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), stack])[shift:]
        assert torch.equal(unpack(moved), unpack(stack))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_loads_another_number_of_nonzeros(assign, capture):
    sparse, other = compiled(capture=capture), compiled(experts(0.6))
    x = torch.randn(E, 2, K)
    expected = other(x)
    buffer = sparse.w_packed
    sparse.load_state_dict(other.state_dict(), assign=assign)
    torch.testing.assert_close(sparse(x), expected)
    assert (sparse.w_packed is buffer) != assign
    torch.testing.assert_close(fxsparse.to_dense(sparse)(x), expected)


def test_loads_a_dense_weight_under_the_dense_key():
    sparse, weight = compiled(), experts(0.7)
    x = torch.randn(E, 2, K)
    sparse.load_state_dict({"w": weight})
    torch.testing.assert_close(sparse(x), Experts(weight)(x))
    assert torch.equal(fxsparse.to_dense(sparse).w, weight)
    with pytest.raises(RuntimeError, match="w: this dense weight would not shrink"):
        sparse.load_state_dict({"w": torch.randn(E, N, K)})
    with pytest.raises(RuntimeError, match=r"w: expected a dense weight of \(3, 40, 24\)"):
        sparse.load_state_dict({"w": experts().mT})
    assert torch.equal(fxsparse.to_dense(sparse).w, weight)


def test_what_is_not_the_same_stack_is_refused():
    sparse = compiled()
    weight = experts()
    for other in (
        pack(weight[:2], format="csr", blocks=2),
        pack(weight.view(-1, K), format="csr", blocks=E),
        pack(weight.view(-1, K), format="csr"),
        pack(weight, format="csr", blocks=E, transposed=True),
        pack(weight.double(), format="csr", blocks=E),
    ):
        with pytest.raises(RuntimeError, match="w_packed: expected a packed weight"):
            sparse.load_state_dict({"w_packed": other})


def test_the_report_and_the_way_back():
    weight = experts()
    weight[1] = 0
    model = Experts(weight)
    model.w.requires_grad_(False)
    sparse = fxsparse.compile(model, min_elements=0)
    (row,) = sparse.report.rows
    assert (row.path, row.status, tuple(row.shape)) == ("w", "sparse", (E, N, K))
    assert row.stored_bytes == sparse.w_packed.numel() and row.nnz == int((weight != 0).sum())
    for module in (sparse, copy.deepcopy(sparse)):
        dense = fxsparse.to_dense(module)
        assert torch.equal(dense.w, weight) and not dense.w.requires_grad
        assert list(dense.state_dict()) == ["w"] and type(dense) is Experts
