"""Views of a :class:`WeightView`: which ones stay stand-ins, and which whole matrices they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..packing import DTYPES
from .weight_view import WeightView, without_modes

aten = torch.ops.aten

#: Operators that make a copy, which of something read-only nobody can tell from a view.
_COPIES = frozenset([aten.clone.default, aten._to_copy.default, aten.lift_fresh.default])
_SAME = frozenset([*_COPIES, aten.detach.default, aten.alias.default])
_RESHAPES = frozenset([aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default])


def is_view(func: Any) -> bool:
    """Whether :func:`view` may know an operator."""
    return func.is_view or func in _COPIES or func in _RESHAPES


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view as a stand-in, found from what the operator does to sizes and strides."""
    weight, *rest = args
    if not isinstance(weight, WeightView):
        return NotImplemented
    size, stride, offset = weight.place.size, weight.place.stride, weight.place.offset
    if func in _SAME:
        dtype = kwargs.get("dtype") or weight.place.dtype
        device = weight.packed.device
        if not _keeps(weight, dtype) or kwargs.get("device", device) != device:
            return NotImplemented
        return weight.like(size, stride, offset, dtype=dtype)
    reshapes = func in _RESHAPES
    if reshapes:
        func, rest = aten.view.default, rest[:1]
    with without_modes(), torch.inference_mode(False):
        phantom = weight.phantom()
        try:
            result = func(phantom, *rest, **kwargs)
        except (RuntimeError, IndexError):
            if reshapes:  # of a copy, as far as the caller knows: its elements lie in order
                return func(weight.dense().contiguous(), *rest)
            return NotImplemented  # the dense weight has the same error, or no error
    is_tensor = isinstance(result, torch.Tensor)
    views = [result] if is_tensor else list(result)
    if not all(_is_plain_view(view, phantom) for view in views):
        return NotImplemented
    found = [weight.like(tuple(v.shape), v.stride(), int(v.storage_offset())) for v in views]
    return found[0] if is_tensor else found


def _is_plain_view(result: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether an operator moved no element, and changed none."""
    same_memory = result.untyped_storage()._cdata == of.untyped_storage()._cdata
    return same_memory and result.dtype == of.dtype and not result.is_neg()


def _keeps(weight: WeightView, dtype: torch.dtype) -> bool:
    """Whether the operator, which computes in the packed dtype, is as exact as ``dtype``."""
    return dtype in DTYPES and torch.promote_types(dtype, weight.head.dtype) == weight.head.dtype


def matrix_blocks(weight: WeightView, swapped: bool = False) -> tuple[tuple[int, ...], bool] | None:
    """A view, or its transpose where ``swapped``, as whole blocks below each other: which, and
    whether it is theirs transposed."""
    size, stride = weight.place.size, weight.place.stride
    found = _span(weight, size[::-1], stride[::-1]) if swapped else _span(weight, size, stride)
    if found is None:
        return None
    first, count, flipped = found
    return weight.blocks[first : first + count], flipped


def batch_blocks(weight: WeightView) -> tuple[list[tuple[int, ...]], bool] | None:
    """A view of three dimensions as whole blocks for each index of the first."""
    size, stride = weight.place.size, weight.place.stride
    if len(size) != 3:
        return None
    found = _span(weight, size[1:], stride[1:])
    rows, cols = _block_shape(weight)
    if found is None or (size[0] > 1 and stride[0] % (rows * cols)):
        return None
    first, count, flipped = found
    begins = [first + i * stride[0] // (rows * cols) for i in range(size[0])]
    return [weight.blocks[begin : begin + count] for begin in begins], flipped


def _span(
    weight: WeightView, size: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, int, bool] | None:
    """Where a matrix of this size and stride begins, in blocks, how many it spans, and whether it is
    their transpose."""
    if 0 in weight.place.size:
        return None
    rows, cols = _block_shape(weight)
    first, inside = divmod(weight.place.offset, rows * cols)
    if inside:
        return None
    for flipped in (False, True):
        count, left = divmod(size[0], rows)
        if size[1] == cols and not left and count and _steps(size, stride, (cols, 1)):
            return first, count, flipped
        size, stride = size[::-1], stride[::-1]
    return None


def _block_shape(weight: WeightView) -> tuple[int, int]:
    """Rows and columns of one matrix in dense form."""
    rows, cols = weight.head.shape
    return (cols, rows) if weight.head.transposed else (rows, cols)


def _steps(size: Sequence[int], stride: Sequence[int], expected: Sequence[int]) -> bool:
    return all(n == 1 or s == e for n, s, e in zip(size, stride, expected))
