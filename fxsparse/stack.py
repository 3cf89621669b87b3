"""Several packed matrices of one shape in one buffer: weights of experts, and weights cut by rows.

A *stack* is a plain 1-D ``uint8`` tensor as a packed matrix is, and stands under the same names. It
holds, little-endian::

    8 bytes  magic
    int64    blocks, the number of matrices (at least 1)
    int64    1 where the weight was a matrix whose rows were cut, 0 where it had three dimensions
    int64    bytes of the whole stack
    int64    blocks + 1 offsets from the start of the stack, multiples of 64
    ...      zeros up to the first offset, then the packed matrices, one right after the other
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

MAGIC = b"fxstack1"
_ALIGN = 64
_WORD = 8
_FIXED = 4 * _WORD


@dataclass(frozen=True)
class Stack:
    """Where the matrices of a stack are; ``flat``: they are the rows of one matrix, in turn."""

    flat: bool
    offsets: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.offsets) - 1


def is_stack(buffer: torch.Tensor) -> bool:
    """Whether a ``uint8`` buffer begins as a stack does (a quick look, not a check)."""
    return buffer.numel() > _FIXED and bytes(buffer[: len(MAGIC)].tolist()) == MAGIC


def stack_bytes(sizes: list[int]) -> int:
    """Bytes of a stack of packed matrices of these sizes."""
    return _offsets(sizes)[-1]


def begin_stack(sizes: list[int], flat: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A new stack, and the parts of it that packed matrices of these sizes are to be written to."""
    offsets = _offsets(sizes)
    stack = torch.zeros(offsets[-1], dtype=torch.uint8, device="cpu")
    words = torch.tensor([len(sizes), int(flat), offsets[-1], *offsets], dtype=torch.int64)
    stack[: len(MAGIC)] = torch.tensor(list(MAGIC), dtype=torch.uint8)
    stack[len(MAGIC) : len(MAGIC) + _WORD * len(words)] = words.view(torch.uint8)
    return stack, [stack[begin : begin + size] for begin, size in zip(offsets, sizes)]


def read_stack(stack: torch.Tensor) -> Stack:
    """The table of a stack; a ``ValueError`` that names the field where it does not fit together."""
    total = stack.numel()
    blocks, flat, size = _words(stack, 1, 3)
    if not 1 <= blocks <= (total - _FIXED) // _WORD:
        raise ValueError(f"packed stack: blocks do not fit in {total} bytes: {blocks}")
    if flat not in (0, 1):
        raise ValueError(f"packed stack: expected the flag of row blocks as 0 or 1, got {flat}")
    if size != total:
        raise ValueError(f"packed stack: expected {size} bytes (by its header), got {total}")
    offsets = _words(stack, 4, blocks + 1)
    if offsets[0] != _first(blocks) or offsets[-1] != total:
        raise ValueError(
            f"packed stack: expected offsets from {_first(blocks)} to {total}, "
            f"got {offsets[0]} to {offsets[-1]}"
        )
    for i, (begin, end) in enumerate(pairwise(offsets)):
        if begin % _ALIGN or begin >= end:
            raise ValueError(
                f"packed stack: expected increasing multiples of {_ALIGN} as offsets, "
                f"got {begin} before {end} at block {i}"
            )
    return Stack(bool(flat), tuple(offsets))


def block(stack: torch.Tensor, table: Stack, i: int) -> torch.Tensor:
    """The packed matrix ``i`` of a stack, as a view."""
    return stack[table.offsets[i] : table.offsets[i + 1]]


def _first(blocks: int) -> int:
    return _up(_FIXED + _WORD * (blocks + 1))


def _offsets(sizes: list[int]) -> list[int]:
    offsets = [_first(len(sizes))]
    for size in sizes:
        offsets.append(offsets[-1] + size)  # packed matrices end at multiples of 64
    return offsets


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _words(stack: torch.Tensor, begin: int, count: int) -> list[int]:
    # A copy: a buffer that is a part of another may begin at any address.
    part = stack[_WORD * begin : _WORD * (begin + count)].clone()
    return part.view(torch.int64).tolist()
