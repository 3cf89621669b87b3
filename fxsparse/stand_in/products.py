"""What operators of torch do with a :class:`WeightView`: multiplies and look-ups.

Composite operators that ``functions`` does not know have been taken apart by torch when they come
here, or are by :func:`dispatch`. A function of the table returns ``NotImplemented`` where it cannot
do without the dense weight.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from .views import batch_blocks, is_view, matrix_blocks, view
from .weight_view import WeightView, densify, read_only

aten = torch.ops.aten


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator some argument of which is a stand-in."""
    if is_view(func):
        result = view(func, args, kwargs)
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


# ---- multiplies ---------------------------------------------------------------------------------


def _multiply(
    weight: WeightView,
    blocks: tuple[int, ...],
    flipped: bool,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ V + bias`` where V is the matrix of these blocks, or its transpose where ``flipped``."""
    head = weight.head
    dtype = weight.place.dtype
    cast = dtype != head.dtype
    if cast and x.dtype == dtype:
        x = x.to(head.dtype)
    rest = (*head.shape, head.dtype, weight.threads)
    whole = flipped != head.transposed and len(blocks) == 1
    whole = whole and bias is not None and bias.dtype == head.dtype

    def by(x: torch.Tensor, i: int) -> torch.Tensor:
        if flipped != head.transposed:
            return ops.run_linear(x, weight.part(i), bias if whole else None, *rest)
        return _linear_backward(x, weight.part(i), rest)

    if len(blocks) == 1:
        y = by(x, blocks[0])
    elif flipped:
        y = torch.cat([by(x, i) for i in blocks], -1)
    else:  # blocks below each other: each takes its part of x
        pieces = x.tensor_split(len(blocks), -1)
        y = functools.reduce(torch.add, map(by, pieces, blocks))
    y = y.to(dtype) if cast else y
    return y if whole or bias is None else _add(y, bias)


def _linear_backward(x: torch.Tensor, packed: torch.Tensor, rest: tuple[Any, ...]) -> torch.Tensor:
    """``x @ W`` with what was packed for ``x @ W.T``, under autocast as a multiply."""
    autocast = torch.is_autocast_enabled("cpu") and torch.float64 not in (x.dtype, rest[2])
    y = ops.linear_backward(x.to(rest[2]) if autocast else x, packed, *rest)
    return y.to(torch.get_autocast_dtype("cpu")) if autocast else y


def _times(
    x: torch.Tensor, weight: WeightView, bias: torch.Tensor | None = None, swapped: bool = False
) -> Any:
    """``x @ V + bias`` with a view V of two dimensions, or its transpose where ``swapped``."""
    found = matrix_blocks(weight, swapped)
    if found is None or x.shape[-1] != weight.place.size[-1 if swapped else 0]:
        return NotImplemented
    return _multiply(weight, *found, x, bias)


def product(a: Any, b: Any) -> Any:
    """``a @ b`` with a stand-in of two or three dimensions, or of one matrix that was expanded to more;
    other dimensions broadcast."""
    if isinstance(a, WeightView):
        if isinstance(b, WeightView) or a.dim() < 2 or b.dim() == 0:
            return NotImplemented
        if b.dim() == 1:
            return product(b, a.transpose(-1, -2))
        found = product(b.transpose(-1, -2), a.transpose(-1, -2))
        return found if found is NotImplemented else found.transpose(-1, -2)
    size, stride, offset = b.place.size, b.place.stride, b.place.offset
    if len(size) > 3 and all(n == 1 or step == 0 for n, step in zip(size[:-2], stride)):
        found = (
            product(a, b.like(size[-2:], stride[-2:], offset)) if a.dim() > 1 else NotImplemented
        )
        if found is NotImplemented:
            return found
        return found.expand(*torch.broadcast_shapes(a.shape[:-2], size[:-2]), *found.shape[-2:])
    if a.dim() == 0 or len(size) not in (2, 3):
        return NotImplemented
    if len(b.place.size) == 2:
        return _times(a, b)
    if a.dim() == 1:
        found = product(a.unsqueeze(0), b)
        return found if found is NotImplemented else found.squeeze(-2)
    count = b.shape[0]
    if count == 1 and a.dim() > 2:
        return product(a, b.squeeze(0))
    if a.dim() > 2 and a.shape[-3] not in (1, count):
        return NotImplemented
    lead = a.shape[:-3]
    each = a.expand(*lead, count, *a.shape[-2:]).movedim(-3, 0)
    found = batched_product(each.flatten(1, -2), b)
    if found is NotImplemented:
        return found
    return found.unflatten(1, (*lead, a.shape[-2])).movedim(0, -3)


def matrix_product(a: Any, b: Any) -> Any:
    """``a @ b`` of two matrices."""
    return product(a, b) if a.dim() == b.dim() == 2 else NotImplemented


def linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    """``x @ W.T + bias``."""
    stands_in = isinstance(weight, WeightView) and len(weight.place.size) == 2
    if not stands_in or isinstance(x, WeightView) or isinstance(bias, WeightView) or x.dim() == 0:
        return NotImplemented
    return _times(x, weight, bias, swapped=True)


def add_product(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(added, WeightView) or added.dim() > 2:
        return NotImplemented
    if beta == alpha == 1 and isinstance(b, WeightView) and added.shape == b.place.size[1:]:
        return NotImplemented if isinstance(a, WeightView) else _times(a, b, added)
    return _plus(added, matrix_product(a, b), beta, alpha)


def matrix_vector(matrix: Any, vector: Any) -> Any:
    """``matrix @ vector`` by ``mv``, which unlike ``matmul`` takes no part in autocast."""
    if not isinstance(matrix, WeightView) or matrix.dim() != 2 or vector.dim() != 1:
        return NotImplemented
    if not torch.is_autocast_enabled("cpu"):
        return product(matrix, vector)
    with torch.autocast("cpu", enabled=False):
        return product(matrix, vector)


def add_matrix_vector(
    added: Any, matrix: Any, vector: Any, *, beta: float = 1, alpha: float = 1
) -> Any:
    if isinstance(added, WeightView):
        return NotImplemented
    return _plus(added, matrix_vector(matrix, vector), beta, alpha)


def batched_product(a: Any, b: Any) -> Any:
    """A product for each index of the first dimension; equal blocks are multiplied at once."""
    if isinstance(a, WeightView):
        if isinstance(b, WeightView):
            return NotImplemented
        found = batched_product(b.transpose(1, 2), a.transpose(1, 2))
        return found if found is NotImplemented else found.transpose(1, 2)
    batch = batch_blocks(b)
    if batch is None or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return NotImplemented
    blocks, flipped = batch
    uses: dict[tuple[int, ...], list[int]] = {}
    for at, which in enumerate(blocks):
        uses.setdefault(which, []).append(at)
    if len(uses) == 1:
        return _multiply(b, blocks[0], flipped, a)
    parts = [_multiply(b, which, flipped, a[at]) for which, at in uses.items()]
    order = [at for use in uses.values() for at in use]
    y = torch.cat(parts)
    return y if order == sorted(order) else y[torch.tensor(order).argsort()]


def add_batched_product(added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(added, WeightView):
        return NotImplemented
    return _plus(added, batched_product(a, b), beta, alpha)


def _plus(added: torch.Tensor, product: Any, beta: float, alpha: float) -> Any:
    """``beta * added + alpha * product``; with ``beta`` 0 what is added is not looked at."""
    if product is NotImplemented or (alpha == 1 and beta == 0):
        return product
    y = product if alpha == 1 else alpha * product
    return y if beta == 0 else _add(y, added if beta == 1 else beta * added)


def _add(y: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """``y + added`` in the dtype of the product, which only autocast makes another one."""
    if added.dtype != y.dtype and not torch.is_autocast_enabled("cpu"):
        raise RuntimeError(
            f"expected what is added to a product of dtype {y.dtype} to have it, got {added.dtype}"
        )
    return y + added.to(y.dtype)


def grouped_product(
    a: Any, b: Any, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Rows of ``a`` up to ``offs[i]`` by the i-th matrix, as mixtures of experts do it."""
    if isinstance(a, WeightView) or offs is None or bias is not None or b.dim() != 3:
        return NotImplemented
    if torch.compiler.is_compiling():  # where experts begin is known at run time
        return NotImplemented
    batch = batch_blocks(b)
    fits = a.dim() == 2 and a.shape[1] == b.shape[1] and len(offs) == len(b)
    if batch is None or not fits or out_dtype not in (None, a.dtype):
        return NotImplemented
    blocks, flipped = batch
    ends = offs.tolist()
    parts = [
        _multiply(b, which, flipped, a[begin:end])
        for which, begin, end in zip(blocks, [0, *ends], ends)
    ]
    rest = a.shape[0] - ends[-1]
    return torch.cat([*parts, parts[0].new_zeros(rest, b.shape[2])])


# ---- rows ---------------------------------------------------------------------------------------


def look_up(weight: Any, indices: Any) -> Any:
    """The rows of a matrix at ``indices``, unpacked."""
    if not isinstance(weight, WeightView) or weight.head.transposed:
        return NotImplemented
    if len(weight.place.size) != 2:
        return NotImplemented
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    found = matrix_blocks(weight)
    if found is None or found[1] or len(found[0]) != 1:
        return NotImplemented
    _check_range(indices, weight.place.size[0])
    packed, head = weight.part(found[0][0]), weight.head
    rows = ops.embedding(indices.long(), packed, *head.shape, head.dtype)
    return rows.to(weight.place.dtype)


def _check_range(indices: torch.Tensor, count: int) -> None:
    """An ``IndexError``, as in torch: the operator's own complaint is a ``RuntimeError``."""
    if indices.numel() and not torch.compiler.is_compiling():
        least, most = (int(bound) for bound in torch.aminmax(indices))
        if least < 0 or most >= count:
            wrong = least if least < 0 else most
            raise IndexError(
                f"index out of range: expected indices from 0 to {count - 1}, got {wrong}"
            )


def _embedding(weight: Any, indices: Any, *only_gradients: Any) -> Any:
    return look_up(weight, indices)


def _index(weight: Any, indices: Any) -> Any:
    """Rows of a matrix, or experts of a stack (which stay packed)."""
    if not isinstance(weight, WeightView) or len(indices) != 1:
        return NotImplemented
    (index,) = indices
    if index is None or index.is_floating_point() or index.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    index = torch.where(index < 0, index + weight.place.size[0], index)
    if len(weight.place.size) == 2:
        return look_up(weight, index)
    batch = batch_blocks(weight)
    if batch is None or index.dim() != 1 or torch.compiler.is_compiling():
        return NotImplemented
    _check_range(index, weight.place.size[0])
    chosen = [batch[0][i] for i in index.tolist()]
    rows, cols = weight.place.size[1:]
    size, stride = (len(chosen), rows, cols), (rows * cols, *weight.place.stride[1:])
    return weight.like(size, stride, 0, blocks=tuple(itertools.chain(*chosen)))


def _index_select(weight: Any, dim: int, index: Any) -> Any:
    if not isinstance(weight, WeightView) or dim not in (0, -len(weight.place.size)):
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
    aten.mm.default: matrix_product,
    aten.addmm.default: add_product,
    aten.mv.default: matrix_vector,
    aten.addmv.default: add_matrix_vector,
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
