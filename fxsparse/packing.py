"""Packed weights: from a dense tensor to one ``uint8`` tensor and back.

A packed weight is a plain 1-D ``uint8`` tensor (a header that describes it, then index and value
streams), so that ``state_dict``, ``deepcopy``, ``torch.save`` and ``torch.export`` need to know
nothing of it. Its layout is defined once, in ``kernel/format``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ._native import _C
from .stack import MAGIC as STACK_MAGIC
from .stack import begin_stack, block, is_stack, read_stack, stack_bytes

#: A weight at path ``P`` that was packed is the buffer ``P + SUFFIX``.
SUFFIX = "_packed"

_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

#: The dtypes a weight can be packed from.
DTYPES = frozenset(_NAMES)

#: Layouts that a weight is packed from through a dense copy of it.
_SPARSE_LAYOUTS = (
    *(torch.sparse_coo, torch.sparse_csr, torch.sparse_csc),
    *(torch.sparse_bsr, torch.sparse_bsc),
)

#: The first bytes of every packed weight (kernel/format/types.h).
_MAGIC = b"fxsparse"

# Bits of the header's flags (kernel/format/types.h): what the dense weight was, for the way back.
_TRANSPOSED, _BUFFER, _REQUIRES_GRAD = 1, 2, 4
_TRAILING = 8  # times a number of two bits

#: A vector counts as one row, and says so by as many dimensions behind it as nothing else has.
_VECTOR = 3


@dataclass(frozen=True)
class Header:
    """What a packed weight says of itself.

    ``shape`` is ``(out_features, in_features)`` of the multiply ``y = x @ W.T``; ``transposed`` says
    that the dense weight was stored as ``(in_features, out_features)``. Of a stack it is what each
    of its ``blocks`` matrices says, which agree, and ``nnz`` is their sum.
    """

    format: str
    dtype: torch.dtype
    shape: tuple[int, int]
    nnz: int
    transposed: bool
    is_buffer: bool
    requires_grad: bool
    blocks: int = 0  #: matrices of a stack; 0 where there is a single one
    flat: bool = False  #: they are the rows of one matrix, in turn
    trailing: int = 0  #: dimensions of size 1 behind these, of a 1x1 convolution; 3: it is a vector
    offsets: tuple[int, ...] = ()  #: where they begin in the stack, and where it ends

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight."""
        rows, cols = self.shape[::-1] if self.transposed else self.shape
        if self.trailing == _VECTOR:
            return (cols,)
        if self.blocks == 0:
            return rows, cols, *[1] * self.trailing
        return (self.blocks * rows, cols) if self.flat else (self.blocks, rows, cols)


def is_packed(buffer: torch.Tensor) -> bool:
    """Whether a buffer begins as a packed weight does (a quick look, not a check)."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device.type != "cpu":
        return False
    if _without_memory(buffer) is not None:
        return False
    begin = bytes(buffer[: len(_MAGIC)].tolist())
    return buffer.numel() > len(_MAGIC) and begin in (_MAGIC, STACK_MAGIC)


def unreadable(weight: torch.Tensor) -> str | None:
    """Why the values of a tensor cannot be read from its memory; None where they can."""
    if weight.layout != torch.strided and weight.layout not in _SPARSE_LAYOUTS:
        return f"already a {weight.layout} tensor: call .to_dense() before compile"
    if weight.device.type != "cpu":
        return f"it is on {weight.device}: expected a weight on the CPU"
    if weight.dtype not in DTYPES:
        return (
            f"dtype {weight.dtype} is not supported: expected float32, float64, bfloat16 or float16"
        )
    if weight.layout in _SPARSE_LAYOUTS:
        return None
    if weight.is_neg() or weight.is_conj():
        return "it is a lazily negated view: call .resolve_neg() before compile"
    return _without_memory(weight)


def strided(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself, or a dense copy of one of a sparse layout."""
    return weight.detach().to_dense() if weight.layout in _SPARSE_LAYOUTS else weight


def _without_memory(tensor: torch.Tensor) -> str | None:
    """Why there is no memory behind a strided tensor on the CPU; None where there is."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__} is not a plain tensor"
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    if tensor.numel() and tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        return "its memory was freed"
    return None


def count_nonzeros(weight: torch.Tensor) -> int:
    """Number of elements that are not (plus or minus) zero; NaN counts as nonzero.

    ``weight`` is 2-D, of any layout, and not :func:`unreadable`.
    """
    weight = strided(weight)
    rows, cols = weight.shape
    return _C.count_nonzeros(weight.data_ptr(), rows, cols, *weight.stride(), _NAMES[weight.dtype])


def expected_bytes(shape: tuple[int, int], nnz: int, dtype: torch.dtype, format: str) -> int:
    """About the bytes of the packed form of an ``(out, in)`` weight whose nnz nonzeros lie evenly."""
    return _C.expected_bytes(format, *shape, nnz, _NAMES[dtype])


def describe(
    weight: torch.Tensor,
    format: str,
    *,
    transposed: bool = False,
    is_buffer: bool = False,
    blocks: int = 0,
) -> list[bytes]:
    """The headers that a dense weight of ``(out, in)``, or of ``(in, out)`` where ``transposed``, gets.

    One, or ``blocks`` of them for a stack: a weight of three dimensions is one of matrices, another
    one is cut by rows. Dimensions of size 1 may follow: those of a 1x1 convolution. Reads the whole weight: what a packed weight takes depends on where its
    nonzeros are.
    """
    if (reason := unreadable(weight)) is not None:
        raise ValueError(f"expected a dense weight that can be packed: {reason}")
    flags = _TRANSPOSED * transposed | _BUFFER * is_buffer | _REQUIRES_GRAD * weight.requires_grad
    dense = strided(weight)
    if blocks == 0:
        flags |= _TRAILING * (_VECTOR if weight.dim() == 1 else weight.dim() - 2)
    return [_C.describe(*_address(m, transposed), format, flags) for m in _matrices(dense, blocks)]


def packed_bytes(headers: list[bytes], *, stacked: bool = False) -> int:
    """Bytes of the packed weight that :func:`describe` announced, all counted."""
    sizes = [_C.packed_bytes(header) for header in headers]
    return stack_bytes(sizes) if stacked else sizes[0]


def pack(
    weight: torch.Tensor,
    *,
    format: str,
    transposed: bool = False,
    is_buffer: bool = False,
    blocks: int = 0,
    headers: list[bytes] | None = None,
) -> torch.Tensor:
    """Pack a dense weight; the arguments are those of :func:`describe`, ``headers`` its result if known.

    Returns a 1-D ``uint8`` tensor. Values keep their bits; -0.0 is stored as a zero. Little but the
    result is allocated.
    """
    if headers is None:
        headers = describe(
            weight, format, transposed=transposed, is_buffer=is_buffer, blocks=blocks
        )
    if blocks == 0:
        packed = torch.empty(packed_bytes(headers), dtype=torch.uint8, device="cpu")
        parts = [packed]
    else:
        sizes = [_C.packed_bytes(header) for header in headers]
        packed, parts = begin_stack(sizes, flat=weight.dim() == 2)
    for matrix, header, part in zip(_matrices(strided(weight), blocks), headers, parts):
        _C.pack(*_address(matrix, transposed), header, part.data_ptr(), part.numel())
    return packed


def _matrices(weight: torch.Tensor, blocks: int) -> tuple[torch.Tensor, ...]:
    """The matrices of a weight that are packed by themselves."""
    while blocks == 0 and 2 < weight.dim() <= 4 and weight.shape[-1] == 1:
        weight = weight.select(-1, 0)
    if blocks == 0 and weight.dim() == 1:
        weight = weight.unsqueeze(0)
    if weight.dim() != (3 if blocks and weight.dim() == 3 else 2):
        raise ValueError(f"expected a dense 2-D weight, got {weight.dim()} dimensions")
    if blocks == 0:
        return (weight,)
    return weight.unbind() if weight.dim() == 3 else weight.chunk(blocks)


def _address(weight: torch.Tensor, transposed: bool) -> tuple[int, int, int, int, int, str]:
    """Address, sizes, strides and type of a weight as (out, in)."""
    (rows, cols), (row_stride, col_stride) = weight.shape, weight.stride()
    if transposed:
        rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
    return weight.data_ptr(), rows, cols, row_stride, col_stride, _NAMES[weight.dtype]


def header(packed: torch.Tensor) -> Header:
    """Read a packed weight's header; a ``ValueError`` where sizes do not fit together."""
    _check_container(packed)
    if not is_stack(packed):
        return _header(packed)
    table = read_stack(packed)
    heads = [_header(block(packed, table, i)) for i in range(table.blocks)]
    first = heads[0]
    for i, head in enumerate(heads):
        if replace(head, nnz=0) != replace(first, nnz=0):
            raise ValueError(f"packed stack: expected blocks that agree, got {head} at block {i}")
    if table.flat and first.transposed:
        raise ValueError("packed stack: expected row blocks that are not transposed")
    return replace(
        first,
        nnz=sum(head.nnz for head in heads),
        blocks=table.blocks,
        flat=table.flat,
        offsets=table.offsets,
    )


def _header(packed: torch.Tensor) -> Header:
    fields = _C.header(packed.data_ptr(), packed.numel())
    return Header(
        format=fields["format"],
        dtype=_DTYPES[fields["value"]],
        shape=(fields["rows"], fields["cols"]),
        nnz=fields["nnz"],
        transposed=fields["transposed"],
        is_buffer=fields["is_buffer"],
        requires_grad=fields["requires_grad"],
        trailing=fields["trailing"],
    )


def blocks_of(packed: torch.Tensor) -> list[torch.Tensor]:
    """The packed matrices of a stack, or the single one that ``packed`` is."""
    if not is_stack(packed):
        return [packed]
    table = read_stack(packed)
    return [block(packed, table, i) for i in range(table.blocks)]


def validate(packed: torch.Tensor) -> Header:
    """Check sizes, offsets and every index of a packed weight; values are left untouched.

    Raises a ``ValueError`` that names the field. What passes can be multiplied safely.
    """
    head = header(packed)
    for part in blocks_of(packed):
        _C.validate(part.data_ptr(), part.numel())
    return head


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The dense weight, bit for bit, in the shape it had before packing (-0.0 comes back as 0.0)."""
    head = header(packed)
    if head.blocks == 0:
        dense = torch.ops.fxsparse.unpack(packed, *head.shape, head.dtype)
        return (dense.t().contiguous() if head.transposed else dense).view(head.dense_shape)
    matrices = torch.empty(head.dense_shape, dtype=head.dtype)
    for part, out in zip(blocks_of(packed), _matrices(matrices, head.blocks)):
        out.copy_(unpack(part))
    return matrices


def _check_container(packed: torch.Tensor) -> None:
    if not isinstance(packed, torch.Tensor):
        raise ValueError(f"expected a packed weight (a uint8 tensor), got {type(packed).__name__}")
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.device.type != "cpu":
        raise ValueError(
            "expected a packed weight (a 1-D uint8 tensor on the CPU), "
            f"got {packed.dim()}-D {packed.dtype} on {packed.device}"
        )
    if not packed.is_contiguous():
        raise ValueError(
            "expected a contiguous packed weight, got a strided view: call .contiguous()"
        )
    if (reason := _without_memory(packed)) is not None:
        raise ValueError(f"expected a packed weight with values: {reason}")
