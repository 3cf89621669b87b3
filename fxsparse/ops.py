"""Fake, autograd and autocast kernels of ``torch.ops.fxsparse``; the CPU kernels are in C++.

``linear(x, packed, bias, out_features, in_features, dtype, threads)`` computes
``x @ W.T + bias`` with ``x`` of shape ``(..., in_features)`` in the weight's dtype. ``threads`` is
an upper bound, 0 leaves the number to the kernel's cost model. The operators trust the indices
inside ``packed`` (sizes are checked on every call, indices when a module receives them): a buffer
made by hand must pass ``fxsparse.packing.validate`` first.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _native  # noqa: F401  (registers the operators)

linear = torch.ops.fxsparse.linear.default
linear_backward = torch.ops.fxsparse.linear_backward.default
unpack = torch.ops.fxsparse.unpack.default


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
def _(x, packed, bias, out_features, in_features, dtype, threads):  # type: ignore[no-untyped-def]
    _check("x", x, packed, in_features, dtype)
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("fxsparse::linear_backward")
def _(grad, packed, out_features, in_features, dtype, threads):  # type: ignore[no-untyped-def]
    _check("grad", grad, packed, out_features, dtype)
    return grad.new_empty((*grad.shape[:-1], in_features))


@torch.library.register_fake("fxsparse::unpack")
def _(packed, out_features, in_features, dtype):  # type: ignore[no-untyped-def]
    return packed.new_empty((out_features, in_features), dtype=dtype)


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.packed, *ctx.rest = inputs[1], *inputs[-4:]


def _linear_grad(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, bias = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    grad_x = linear_backward(grad, ctx.packed, *ctx.rest) if x else None
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if bias else None
    return grad_x, None, grad_bias, None, None, None, None


def _linear_backward_grad(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return linear(grad, ctx.packed, None, *ctx.rest), None, None, None, None, None


torch.library.register_autograd("fxsparse::linear", _linear_grad, setup_context=_save_weight)
torch.library.register_autograd(
    "fxsparse::linear_backward", _linear_backward_grad, setup_context=_save_weight
)


def _linear_autocast(x, packed, bias, out_features, in_features, dtype, threads):  # type: ignore[no-untyped-def]
    """As ``nn.Linear`` under autocast: x of any eligible dtype, y in the autocast dtype.

    The multiply itself runs in the weight's own dtype, which is the more exact of the two. As in
    torch, float64 takes no part in autocast.
    """
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        eligible = torch.float64 not in (x.dtype, dtype) and x.is_floating_point()
        if not eligible:
            return linear(x, packed, bias, out_features, in_features, dtype, threads)
        bias = bias.to(dtype) if bias is not None else None
        y = linear(x.to(dtype), packed, bias, out_features, in_features, dtype, threads)
        return y.to(torch.get_autocast_dtype("cpu"))


_library = torch.library.Library("fxsparse", "IMPL")
_library.impl("linear", _linear_autocast, "AutocastCPU")
