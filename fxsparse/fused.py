"""Fused calls that add or multiply a tensor of which a graph does not tell the shape.

The operators want a tensor of the result's shape and dtype. These functions stand in graphs before
them: anything else, such as a number or a tensor that is broadcast, is added as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from . import ops
from .fused_ops import run_linear_fused, run_mlp


def linear_with(  # type: ignore[no-untyped-def]
    x, packed, bias, other, out_features, in_features, dtype, threads, epilogue, more=False
) -> Any:
    """``ops.linear_fused`` with any ``other``; ``epilogue`` ends in ``add`` or ``mul``."""
    sizes = (out_features, in_features, dtype, threads)
    if isinstance(x, fx.Proxy) or isinstance(other, fx.Proxy):
        return _trace(linear_with, x, packed, bias, other, *sizes, epilogue, more)
    if _fits(other, x, out_features, dtype):
        return run_linear_fused(x, packed, bias, other, *sizes, epilogue, more)
    activation, _, last = epilogue.rpartition(" ")
    if activation:
        y = run_linear_fused(x, packed, bias, None, *sizes, activation, more)
    else:
        y = ops.run_linear(x, packed, bias, *sizes, more)
    return y + other if last == "add" else y * other


def mlp_with(x, gate, gate_bias, up, up_bias, down, down_bias, residual, *rest) -> Any:  # type: ignore[no-untyped-def]
    """``ops.mlp`` with any ``residual``; ``rest`` are its other arguments."""
    weights = (gate, gate_bias, up, up_bias, down, down_bias)
    if isinstance(x, fx.Proxy) or isinstance(residual, fx.Proxy):
        return _trace(mlp_with, x, *weights, residual, *rest)
    if _fits(residual, x, rest[2], rest[3]):
        return run_mlp(x, *weights, residual, *rest)
    return run_mlp(x, *weights, None, *rest) + residual


def _fits(other: Any, x: torch.Tensor, out_features: int, dtype: torch.dtype) -> bool:
    """Whether ``other`` has the shape and dtype of the result of a multiply of ``x``."""
    if not isinstance(other, torch.Tensor) or other.dtype is not dtype:
        return False
    return other.shape == (*x.shape[:-1], out_features)


def _trace(function: Callable[..., Any], *args: Any) -> fx.Proxy:
    """A node of the function itself: unpickling a graph traces its code again."""
    proxy = next(argument for argument in args if isinstance(argument, fx.Proxy))
    return proxy.tracer.create_proxy("call_function", function, args, {})
