"""What functions of torch do with a :class:`WeightView`, before torch takes them apart.

Here a multiply becomes the operator with its gradient and its manners under autocast, and nobody who
watches operators sees a dense one. What is not in the table comes to ``products`` in pieces.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import string
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from .products import (
    add_batched_product,
    add_matrix_vector,
    add_product,
    batched_product,
    grouped_product,
    linear,
    look_up,
    matrix_product,
    matrix_vector,
    product,
)
from .weight_view import WeightView, densify, without_modes


def dispatch_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one function some argument of which is a stand-in."""
    handler = FUNCTIONS.get(func)
    if handler is not None and set(kwargs) <= _names(handler):
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func in _OF_MEMORY:
        return func(*densify(args), **kwargs)
    if isinstance(func, types.FunctionType) and func.__module__ == F.__name__:
        return _unguarded(func)(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if torch.compiler.is_exporting():
            return _exported(func, args, kwargs)
        return func(*args, **kwargs)


def _exported(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The modes of torch.export know no stand-ins: they see no views of them, and for the rest dense ones."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if all(isinstance(x, WeightView) for x in tensors):
        with without_modes():
            result = func(*args, **kwargs)
        if all(isinstance(x, WeightView) for x in tree_leaves(result)):
            return result
    return func(*densify(args), **densify(kwargs))


#: Methods that read a tensor's memory past all operators.
_OF_MEMORY = frozenset([torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__])


@functools.cache
def _unguarded(func: types.FunctionType) -> Callable[..., Any]:
    """A function of ``torch.nn.functional`` that does not ask first whether an argument wants to
    handle the call: the functions that it calls ask it."""

    def never(*_: Any) -> bool:
        return False

    guards = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    names = {**func.__globals__, **dict.fromkeys(guards, never)}
    copy = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


@functools.cache
def _names(handler: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(handler).parameters)


def _t(input: Any) -> Any:
    """Without a detour through the operator, which takes twice as long."""
    place = input.place
    if len(place.size) != 2:
        return NotImplemented
    return input.like(place.size[::-1], place.stride[::-1], place.offset)


def _getitem(input: Any, index: Any) -> Any:
    """One expert of several, likewise."""
    if type(index) is not int or not isinstance(input, WeightView) or not input.place.size:
        return NotImplemented
    (count, *size), (step, *stride) = input.place.size, input.place.stride
    if not -count <= index < count:
        return NotImplemented
    return input.like(tuple(size), tuple(stride), input.place.offset + step * (index % count))


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return linear(input, weight, bias)


def _matmul(input: Any, other: Any) -> Any:
    return product(input, other)


def _mm(input: Any, mat2: Any) -> Any:
    return matrix_product(input, mat2)


def _bmm(input: Any, mat2: Any) -> Any:
    return batched_product(input, mat2)


def _mv(input: Any, vec: Any) -> Any:
    return matrix_vector(input, vec)


def _addmv(input: Any, mat: Any, vec: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return add_matrix_vector(input, mat, vec, beta=beta, alpha=alpha)


def _inner(input: Any, other: Any) -> Any:
    if isinstance(other, WeightView):
        return linear(input, other)
    if input.dim() != 2 or other.dim() != 2:
        return NotImplemented
    return product(input, other.t())


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return add_product(input, mat1, mat2, beta=beta, alpha=alpha)


def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return add_batched_product(input, batch1, batch2, beta=beta, alpha=alpha)


def _grouped_mm(mat_a: Any, mat_b: Any, *, offs: Any = None) -> Any:
    return grouped_product(mat_a, mat_b, offs)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return look_up(weight, input) if max_norm is None else NotImplemented


def _einsum(equation: Any, *operands: Any) -> Any:
    """Products of a tensor and a weight of two dimensions, or of three where both have the first."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return NotImplemented
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return NotImplemented
    (w, weight), (x, input) = sorted(
        zip(terms, operands), key=lambda pair: not isinstance(pair[1], WeightView)
    )
    if x.count("...") == out.count("...") == 1:  # dimensions that only x has
        unused = iter(sorted(set(string.ascii_letters) - {*w, *x, *out}))
        dots = "".join(itertools.islice(unused, max(0, input.dim() + 3 - len(x))))
        x, out = x.replace("...", dots), out.replace("...", dots)
    letters = len(x) == input.dim() and len(w) == weight.dim()
    letters = letters and all(t.isalpha() and len(set(t)) == len(t) for t in (w, x, out))
    if not letters or isinstance(input, WeightView) or not set(x) <= set(w) | set(out):
        return NotImplemented
    if weight.dim() == 3 and w[0] in out and w[0] not in x:  # the same for each matrix
        input, x = input.expand(weight.shape[0], *input.shape), w[0] + x
    shared = [c for c in w if c in x and c in out]
    summed = [c for c in w if c in x and c not in out]
    free = [c for c in w if c not in x]
    if len(summed) != 1 or len(free) != 1 or not set(free) <= set(out) or len(shared) > 1:
        return NotImplemented
    rest = [c for c in x if c not in shared and c not in summed]
    x_order, w_order = [*shared, *rest, *summed], [*shared, *free, *summed]
    moved = input.permute([x.index(c) for c in x_order])
    matrix = weight.permute([w.index(c) for c in w_order])
    if shared:
        flat = moved.reshape(moved.shape[0], math.prod(moved.shape[1:-1]), moved.shape[-1])
        y = batched_product(flat, matrix.transpose(1, 2))
        y = y if y is NotImplemented else y.reshape(*moved.shape[:-1], matrix.shape[1])
    else:
        y = linear(moved, matrix)
    if y is NotImplemented:
        return y
    y_order = [*shared, *rest, *free]
    return y.permute([y_order.index(c) for c in out])


def _tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
    """With one dimension summed over."""
    if dims == 1:
        dims = ([-1], [0])
    if out is not None or not isinstance(dims, (list, tuple)) or len(dims) != 2:
        return NotImplemented
    first, second = ([d] if isinstance(d, int) else list(d) for d in dims)
    if len(first) != 1 or len(second) != 1 or a.dim() == 0 or b.dim() == 0:
        return NotImplemented
    if isinstance(b, WeightView):
        return linear(a.movedim(first[0], -1), b.movedim(second[0], -1))
    found = linear(b.movedim(second[0], -1), a.movedim(first[0], -1))
    return found if found is NotImplemented else found.movedim(-1, 0)


def _everywhere(name: str) -> list[Any]:
    return [getattr(holder, name) for holder in (torch, torch.Tensor) if hasattr(holder, name)]


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.grouped_mm: _grouped_mm,
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__getitem__: _getitem,
    **{vars(torch._C.TensorBase)[name].__get__: _t for name in ("T", "mT")},
    **{
        function: handler
        for name, handler in (
            ("t", _t),
            ("matmul", _matmul),
            ("mm", _mm),
            ("bmm", _bmm),
            ("mv", _mv),
            ("addmv", _addmv),
            ("inner", _inner),
            ("addmm", _addmm),
            ("baddbmm", _baddbmm),
        )
        for function in _everywhere(name)
    },
}
