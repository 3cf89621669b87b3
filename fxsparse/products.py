"""What operators of torch do with a :class:`WeightView`: multiplies, look-ups and views.

Composite operators that ``functions`` does not know have been taken apart by torch when they come
here, or are by :func:`dispatch`. A function of the table returns ``NotImplemented`` where it cannot
do without the dense weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import ops
from .packing import blocks_of
from .weight_view import WeightView, densify, read_only

aten = torch.ops.aten


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator some argument of which is a stand-in."""
    if func.is_view or func in _KEEP_VALUES:
        result = _view(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if func in PRODUCTS:
        result = PRODUCTS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func._schema.is_mutable and _is_written(func._schema, args, kwargs):
        raise read_only(str(func))
    if func._can_decompose():
        return func.decompose(*args, **kwargs)
    return func(*densify(args), **densify(kwargs))


# ---- views --------------------------------------------------------------------------------------

#: Operators that make a copy, which of something read-only nobody can tell from a view.
_KEEP_VALUES = frozenset(
    [aten.clone.default, aten._to_copy.default, aten._unsafe_view.default, aten.lift_fresh.default]
)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view as a stand-in, found from what the operator does to sizes and strides."""
    weight, *rest = args
    if not isinstance(weight, WeightView):
        return NotImplemented
    if func is aten._to_copy.default and not set(kwargs) <= {"dtype"}:
        return NotImplemented
    dtype = kwargs.get("dtype") or weight.dtype
    if torch.promote_types(dtype, weight.head.dtype) != weight.head.dtype:
        return NotImplemented  # the operator would compute with fewer digits than asked for
    size, stride, offset = tuple(weight.shape), weight.stride(), int(weight.storage_offset())
    if func in (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default):
        return weight.like(size, stride, offset, dtype=dtype)
    if func is aten.t.default or (func is aten.transpose.int and len(size) == 2):
        return weight.like(size[::-1], stride[::-1], offset)
    if func is aten._unsafe_view.default:
        func = aten.view.default
    with torch.inference_mode(False):
        try:
            result = func(weight.phantom(), *rest, **kwargs)
        except (RuntimeError, IndexError):  # the dense weight has the same error, or no error
            return NotImplemented
    if not isinstance(result, torch.Tensor):
        return [weight.like(tuple(r.shape), r.stride(), int(r.storage_offset())) for r in result]
    return weight.like(tuple(result.shape), result.stride(), int(result.storage_offset()))


# ---- what a view is of --------------------------------------------------------------------------


def _matrix(weight: WeightView) -> tuple[tuple[int, ...], bool] | None:
    """A view as whole blocks below each other: which, and whether it is their transpose."""
    rows, cols = _block_shape(weight)
    first, inside = divmod(int(weight.storage_offset()), rows * cols)
    if inside:
        return None
    size, stride = tuple(weight.shape), weight.stride()
    for flipped in (False, True):
        count, left = divmod(size[0], rows)
        if size[1] == cols and not left and count and _steps(size, stride, (cols, 1)):
            return weight.blocks[first : first + count], flipped
        size, stride = size[::-1], stride[::-1]
    return None


def _batch(weight: WeightView) -> tuple[tuple[int, ...], bool] | None:
    """A view of three dimensions as a block for each index of the first."""
    rows, cols = _block_shape(weight)
    count = weight.shape[0]
    if int(weight.storage_offset()) % (rows * cols) or (
        count > 1 and weight.stride(0) % (rows * cols)
    ):
        return None
    one = weight.like(tuple(weight.shape[1:]), weight.stride()[1:], 0)
    found = _matrix(one)
    if found is None or len(found[0]) != 1:
        return None
    first, step = int(weight.storage_offset()) // (rows * cols), weight.stride(0) // (rows * cols)
    return tuple(weight.blocks[first + step * i] for i in range(count)), found[1]


def _block_shape(weight: WeightView) -> tuple[int, int]:
    """Rows and columns of one matrix in dense form."""
    rows, cols = weight.head.shape
    return (cols, rows) if weight.head.transposed else (rows, cols)


def _steps(size: Sequence[int], stride: Sequence[int], expected: Sequence[int]) -> bool:
    return all(n == 1 or s == e for n, s, e in zip(size, stride, expected))


# ---- multiplies ---------------------------------------------------------------------------------


def _multiply(
    weight: WeightView,
    blocks: tuple[int, ...],
    flipped: bool,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ V + bias`` where V is the matrix of these blocks, or its transpose where ``flipped``."""
    head, parts = weight.head, blocks_of(weight.packed)
    cast = weight.dtype != head.dtype
    if cast and x.dtype == weight.dtype:
        x = x.to(head.dtype)
    rest = (*head.shape, head.dtype, weight.threads)
    if flipped != head.transposed:
        whole = bias is not None and len(blocks) == 1 and bias.dtype == head.dtype
        each = [ops.linear(x, parts[i], bias if whole else None, *rest) for i in blocks]
        y = each[0] if len(each) == 1 else torch.cat(each, -1)
    else:
        whole = False
        y = _multiply_backward(x, [parts[i] for i in blocks], rest)
    y = y.to(weight.dtype) if cast else y
    return y if whole or bias is None else y + bias


def _multiply_backward(
    x: torch.Tensor, parts: list[torch.Tensor], rest: tuple[Any, ...]
) -> torch.Tensor:
    """``x`` times the packed matrices below each other, where they were packed for ``x @ W.T``."""
    autocast = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    if autocast:
        x = x.to(rest[2])
    pieces = zip(x.chunk(len(parts), -1), parts)
    y = sum(ops.linear_backward(piece, part, *rest) for piece, part in pieces)
    assert isinstance(y, torch.Tensor)
    return y.to(torch.get_autocast_dtype("cpu")) if autocast else y


def _times(x: torch.Tensor, weight: WeightView, bias: torch.Tensor | None = None) -> Any:
    """``x @ V + bias`` with a view V of two dimensions."""
    found = _matrix(weight)
    if found is None or x.shape[-1] != weight.shape[0]:
        return NotImplemented
    return _multiply(weight, *found, x, bias)


def product(a: Any, b: Any) -> Any:
    """``a @ b`` with a stand-in of two dimensions; the other factor may have more than two."""
    if not isinstance(b, WeightView):
        found = _times(b.transpose(-1, -2), a.t())  # a @ b = (b.T @ a.T).T
        return found if found is NotImplemented else found.transpose(-1, -2)
    return NotImplemented if isinstance(a, WeightView) else _times(a, b)


def linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    """``x @ W.T + bias``."""
    stands_in = isinstance(weight, WeightView) and weight.dim() == 2
    if not stands_in or isinstance(x, WeightView) or isinstance(bias, WeightView) or x.dim() == 0:
        return NotImplemented
    return _times(x, weight.t(), bias)


def add_product(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(added, WeightView):
        return NotImplemented
    if beta == alpha == 1 and added.dim() == 1 and not isinstance(a, WeightView):
        return _times(a, b, added)
    return _plus(added, product(a, b), beta, alpha)


def matrix_vector(matrix: Any, vector: Any) -> Any:
    if isinstance(vector, WeightView):
        return NotImplemented
    return _times(vector, matrix.t())


def batched_product(a: Any, b: Any) -> Any:
    """A product for each index of the first dimension; equal blocks in turn are multiplied at once."""
    if isinstance(a, WeightView):
        if isinstance(b, WeightView):
            return NotImplemented
        found = batched_product(b.transpose(1, 2), a.transpose(1, 2))
        return found if found is NotImplemented else found.transpose(1, 2)
    batch = _batch(b)
    if batch is None or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return NotImplemented
    blocks, flipped = batch
    y = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    for i in dict.fromkeys(blocks):
        at = [j for j, block in enumerate(blocks) if block == i]
        if len(at) == len(blocks):
            return _multiply(b, (i,), flipped, a)
        y[at] = _multiply(b, (i,), flipped, a[at])
    return y


def add_batched_product(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return (
        NotImplemented
        if isinstance(added, WeightView)
        else _plus(added, batched_product(a, b), beta, alpha)
    )


def _plus(added: torch.Tensor, product: Any, beta: float, alpha: float) -> Any:
    """``beta * added + alpha * product``; with ``beta`` 0 what is added is not looked at."""
    if product is NotImplemented or alpha == beta == 1:
        return product if product is NotImplemented else product + added
    return alpha * product if beta == 0 else alpha * product + beta * added


def grouped_product(
    a: Any, b: Any, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Rows of ``a`` up to ``offs[i]`` by the i-th matrix, as mixtures of experts do it."""
    if isinstance(a, WeightView) or offs is None or bias is not None or b.dim() != 3:
        return NotImplemented
    batch = _batch(b)
    if batch is None or a.dim() != 2 or out_dtype not in (None, a.dtype):
        return NotImplemented
    blocks, flipped = batch
    y = a.new_zeros((a.shape[0], b.shape[2]))
    begin = 0
    for i, end in zip(blocks, offs.tolist()):
        if end > begin:
            y[begin:end] = _multiply(b, (i,), flipped, a[begin:end])
        begin = max(begin, end)
    return y


# ---- rows ---------------------------------------------------------------------------------------


def look_up(weight: Any, indices: Any) -> Any:
    """The rows of a matrix at ``indices``, unpacked."""
    if not isinstance(weight, WeightView) or weight.head.transposed or weight.dim() != 2:
        return NotImplemented
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    found = _matrix(weight)
    if found is None or found[1] or len(found[0]) != 1:
        return NotImplemented
    packed = blocks_of(weight.packed)[found[0][0]]
    rows = ops.embedding(indices.long(), packed, *weight.head.shape, weight.head.dtype)
    return rows.to(weight.dtype)


def _embedding(weight: Any, indices: Any, *only_gradients: Any) -> Any:
    return look_up(weight, indices)


def _index(weight: Any, indices: Any) -> Any:
    """Rows of a matrix, or experts of a stack (which stay packed)."""
    if not isinstance(weight, WeightView) or len(indices) != 1:
        return NotImplemented
    (index,) = indices
    if index is None or index.is_floating_point() or index.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    if weight.dim() == 2:
        return look_up(weight, index)
    batch = _batch(weight) if weight.dim() == 3 and index.dim() == 1 else None
    if batch is None:
        return NotImplemented
    chosen = tuple(batch[0][i] for i in index.tolist())
    rows, cols = weight.head.shape
    size = (len(chosen), *weight.shape[1:])
    return weight.like(size, (rows * cols, *weight.stride()[1:]), 0, blocks=chosen)


def _index_select(weight: Any, dim: int, index: Any) -> Any:
    if not isinstance(weight, WeightView) or dim not in (0, -weight.dim()):
        return NotImplemented
    return _index(weight, [index])


def _embedding_bag(weight: Any, indices: Any, offsets: Any, *rest: Any) -> Any:
    """Over the rows that are asked for alone."""
    if not isinstance(weight, WeightView) or any(isinstance(r, WeightView) for r in rest):
        return NotImplemented
    which, renamed = torch.unique(indices, return_inverse=True)
    rows = look_up(weight, which)
    if rows is NotImplemented or (len(rest) > 5 and rest[5] >= 0):
        return NotImplemented
    return aten._embedding_bag_forward_only(rows, renamed.to(indices.dtype), offsets, *rest)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.linear.default: linear,
    aten.mm.default: product,
    aten.addmm.default: add_product,
    aten.mv.default: matrix_vector,
    aten.bmm.default: batched_product,
    aten.baddbmm.default: add_batched_product,
    aten._grouped_mm.default: grouped_product,
    aten.embedding.default: _embedding,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
}


def _is_written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument that the operator writes to is a stand-in."""
    given = {**{a.name: value for a, value in zip(schema.arguments, args)}, **kwargs}
    written = (
        given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write
    )
    return any(isinstance(value, WeightView) for value in written)
