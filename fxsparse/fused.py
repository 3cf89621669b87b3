"""Fused calls that add or multiply a tensor of which a graph does not tell the shape.

The operators want a tensor of the result's shape and dtype. These functions stand in graphs before
them: anything else, such as a number or a tensor that is broadcast, is added as torch does it.

``other_first`` tells that it is the first of the two in the sum or product: the result lies in memory as
the first does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from . import ops
from .fused_ops import run_linear_fused, run_mlp


def linear_with(  # type: ignore[no-untyped-def]
    x, packed, bias, other, out_features, in_features, dtype, threads, epilogue, more=False, *,
    other_first=False,
) -> Any:  # fmt: skip
    """``ops.linear_fused`` with any ``other``; ``epilogue`` ends in ``add`` or ``mul``."""
    sizes = (out_features, in_features, dtype, threads)
    if isinstance(x, fx.Proxy) or isinstance(other, fx.Proxy):
        return _trace(linear_with, other_first, x, packed, bias, other, *sizes, epilogue, more)
    if _fits(other, x, out_features, dtype, other_first):
        return run_linear_fused(x, packed, bias, other, *sizes, epilogue, more)
    activation, _, last = epilogue.rpartition(" ")
    if activation:
        y = run_linear_fused(x, packed, bias, None, *sizes, activation, more)
    else:
        y = ops.run_linear(x, packed, bias, *sizes, more)
    first, second = (other, y) if other_first else (y, other)
    return first + second if last == "add" else first * second


def mlp_with(  # type: ignore[no-untyped-def]
    x, gate, gate_bias, up, up_bias, down, down_bias, residual, *rest, other_first=False
) -> Any:
    """``ops.mlp`` with any ``residual``; ``rest`` are its other arguments."""
    weights = (gate, gate_bias, up, up_bias, down, down_bias)
    if isinstance(x, fx.Proxy) or isinstance(residual, fx.Proxy):
        return _trace(mlp_with, other_first, x, *weights, residual, *rest)
    if _fits(residual, x, rest[2], rest[3], other_first):
        return run_mlp(x, *weights, residual, *rest)
    y = run_mlp(x, *weights, None, *rest)
    return residual + y if other_first else y + residual


def _fits(
    other: Any, x: torch.Tensor, out_features: int, dtype: torch.dtype, other_first: bool
) -> bool:
    """Whether ``other`` has the shape and dtype of the result of a multiply of ``x``, and the sum or
    product of the two lies in memory as that result does."""
    if not isinstance(other, torch.Tensor) or other.dtype is not dtype:
        return False
    if other.layout is not torch.strided or (other_first and not other.is_contiguous()):
        return False
    return other.shape == (*x.shape[:-1], out_features)


def order(other_first: bool) -> dict[str, Any]:
    """The keyword arguments of a node that say so."""
    return {"other_first": True} if other_first else {}


def _trace(function: Callable[..., Any], other_first: bool, *args: Any) -> fx.Proxy:
    """A node of the function itself: unpickling a graph traces its code again."""
    proxy = next(argument for argument in args if isinstance(argument, fx.Proxy))
    return proxy.tracer.create_proxy("call_function", function, args, order(other_first))
