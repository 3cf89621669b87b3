"""Fake, autograd and autocast kernels of ``torch.ops.fxsparse``; the CPU kernels are in C++.

``linear(x, packed, bias, out_features, in_features, dtype, threads, more=False)`` computes
``x @ W.T + bias`` with ``x`` of shape ``(..., in_features)`` in the weight's dtype. ``threads`` is
an upper bound, 0 leaves the number to the kernel's cost model. ``more`` promises that the next
operator that uses several threads is a ``linear`` too: the pool's threads then stay awake for it for
a moment, which would keep torch's own threads from the CPU.
``embedding(indices, packed, out_features, in_features, dtype)`` is the rows of ``W`` at ``indices``
(int64, any shape). The operators trust the indices
inside ``packed`` (sizes are checked on every call, indices when a module receives them): a buffer
made by hand must pass ``fxsparse.packing.validate`` first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from . import _native  # noqa: F401  (registers the operators)

linear = torch.ops.fxsparse.linear.default
linear_backward = torch.ops.fxsparse.linear_backward.default
unpack = torch.ops.fxsparse.unpack.default
embedding = torch.ops.fxsparse.embedding.default


def _check(
    what: str, x: torch.Tensor, packed: torch.Tensor, features: int, dtype: torch.dtype
) -> None:
    if x.device != packed.device:
        raise ValueError(
            f"expected {what} on {packed.device} (the packed weight's), got {x.device}"
        )
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(f"expected {what} of shape (..., {features}), got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"expected {what} of dtype {dtype} (the weight's), got {x.dtype}")


@torch.library.register_fake("fxsparse::linear")
def _(x, packed, bias, out_features, in_features, dtype, threads, more=False):  # type: ignore[no-untyped-def]
    _check("x", x, packed, in_features, dtype)
    if bias is not None:
        _check("bias", bias, packed, out_features, dtype)
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("fxsparse::linear_backward")
def _(grad, packed, out_features, in_features, dtype, threads):  # type: ignore[no-untyped-def]
    _check("grad", grad, packed, out_features, dtype)
    return grad.new_empty((*grad.shape[:-1], in_features))


@torch.library.register_fake("fxsparse::unpack")
def _(packed, out_features, in_features, dtype):  # type: ignore[no-untyped-def]
    return packed.new_empty((out_features, in_features), dtype=dtype)


@torch.library.register_fake("fxsparse::embedding")
def _(indices, packed, out_features, in_features, dtype):  # type: ignore[no-untyped-def]
    return packed.new_empty((*indices.shape, in_features), dtype=dtype)


class _Linear(torch.autograd.Function):
    """``linear`` where x, or a bias of 16 bits, requires a gradient."""

    @staticmethod
    def forward(ctx: Any, keys: Any, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(packed)  # an error where it is written before backward
        ctx.rest = rest
        return linear.redispatch(keys, x, packed, bias, *rest)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        grad_x = linear_backward(grad, packed, *ctx.rest[:4]) if ctx.needs_input_grad[1] else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
        return None, grad_x, None, grad_bias, *[None] * len(ctx.rest)


def _linear_autograd(keys, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
    """Not torch.library.register_autograd: that took 61 us at 64x64 where nn.Linear takes 13, since a
    bias that requires a gradient, as a model's does until it is frozen, went through Python's part of
    autograd. Added by torch it does not, and rounds the same in 32 and 64 bits."""
    below = keys & torch._C._after_autograd_keyset
    if forward_ad._current_level >= 0:  # raises where an input has a tangent: there is no formula
        return _Linear.apply(below, x, packed, bias, *rest)
    if not torch.is_grad_enabled():
        return linear.redispatch(below, x, packed, bias, *rest)
    trains_bias = bias is not None and bias.requires_grad
    if x.requires_grad or (trains_bias and bias.itemsize == 2):
        return _Linear.apply(below, x, packed, bias, *rest)
    if trains_bias:
        return linear.redispatch(below, x, packed, None, *rest) + bias
    return linear.redispatch(below, x, packed, bias, *rest)


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rest = inputs[2:]


def _linear_backward_grad(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (packed,) = ctx.saved_tensors
    return linear(grad, packed, None, *ctx.rest), None, None, None, None, None


torch.library.register_autograd(
    "fxsparse::linear_backward", _linear_backward_grad, setup_context=_save_weight
)


def _linear_autocast(x, packed, bias, *rest):  # type: ignore[no-untyped-def]
    """As ``nn.Linear`` under autocast: x of any eligible dtype, y in the autocast dtype.

    The multiply itself runs in the weight's own dtype, which is the more exact of the two. As in
    torch, float64 takes no part in autocast.
    """
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        dtype = rest[2]
        eligible = torch.float64 not in (x.dtype, dtype) and x.is_floating_point()
        if not eligible:
            return linear(x, packed, bias, *rest)
        bias = bias.to(dtype) if bias is not None else None
        y = linear(x.to(dtype), packed, bias, *rest)
        return y.to(torch.get_autocast_dtype("cpu"))


_library = torch.library.Library("fxsparse", "IMPL")
_library.impl("linear", _linear_autocast, "AutocastCPU")
_library.impl("linear", _linear_autograd, "Autograd", with_keyset=True)
