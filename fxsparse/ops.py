"""Fake, autograd and autocast kernels of ``torch.ops.fxsparse``; the CPU kernels are in C++.

``linear(x, packed, bias, out_features, in_features, dtype, threads, more=False)`` computes
``x @ W.T + bias`` with ``x`` of shape ``(..., in_features)`` in the weight's dtype. ``threads`` is
an upper bound, 0 leaves the number to the kernel's cost model. ``more`` promises that the next
operator that uses several threads is a ``linear`` too: the pool's threads then stay awake for it for
a moment, which would keep torch's own threads from the CPU.
``embedding(indices, packed, out_features, in_features, dtype)`` is the rows of ``W`` at ``indices``
(int64, any shape).

``conv1x1(x, packed, bias, out_channels, in_channels, dtype, threads, spatial)`` multiplies each pixel
of images of ``spatial`` (1 or 2) dimensions: x is ``(batch, in_channels, ...)``, or one image without
``batch``. y is laid out as torch's own convolution would: channels last where x is.

``linear.no_grad`` and ``conv1x1.no_grad`` are the same without gradients, and take fewer arguments;
:func:`run_linear` and :func:`run_conv1x1` call the one or the other.

The operators trust the indices
inside ``packed`` (sizes are checked on every call, indices when a module receives them): a buffer
made by hand must pass ``fxsparse.packing.validate`` first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import _native  # noqa: F401  (registers the operators)

linear = torch.ops.fxsparse.linear.default
linear_no_grad = torch.ops.fxsparse.linear.no_grad
conv1x1 = torch.ops.fxsparse.conv1x1.default
conv1x1_no_grad = torch.ops.fxsparse.conv1x1.no_grad
linear_backward = torch.ops.fxsparse.linear_backward.default
unpack = torch.ops.fxsparse.unpack.default
embedding = torch.ops.fxsparse.embedding.default
# Their other kernels are in fused_ops.py.
linear_fused = torch.ops.fxsparse.linear_fused.default
linears = torch.ops.fxsparse.linears.default
mlp = torch.ops.fxsparse.mlp.default


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
def _fake_linear(x, packed, bias, out_features, in_features, dtype, threads, more=False):  # type: ignore[no-untyped-def]
    _check("x", x, packed, in_features, dtype)
    if bias is not None:
        _check("bias", bias, packed, out_features, dtype)
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("fxsparse::linear.no_grad")
def _(x, packed, bias, out_features, threads=0, more=False):  # type: ignore[no-untyped-def]
    return _fake_linear(x, packed, bias, out_features, x.shape[-1], x.dtype, threads, more)


@torch.library.register_fake("fxsparse::conv1x1")
def _fake_conv1x1(x, packed, bias, out_channels, in_channels, dtype, threads, spatial):  # type: ignore[no-untyped-def]
    channels = x.dim() - spatial - 1
    if channels not in (0, 1):
        raise ValueError(
            f"expected x of {spatial + 1} or {spatial + 2} dimensions, got {tuple(x.shape)}"
        )
    _check("x", x.movedim(channels, -1), packed, in_channels, dtype)
    if bias is not None:
        _check("bias", bias, packed, out_channels, dtype)
    shape = list(x.shape)
    shape[channels] = out_channels
    layout = suggest_memory_format(x) if x.dim() == 4 and spatial == 2 else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


@torch.library.register_fake("fxsparse::conv1x1.no_grad")
def _(x, packed, bias, out_channels, threads, spatial):  # type: ignore[no-untyped-def]
    channels = x.shape[-spatial - 1]
    return _fake_conv1x1(x, packed, bias, out_channels, channels, x.dtype, threads, spatial)


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


def _below_autograd(operator, no_grad, keys, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
    """``operator`` below autograd. A graph that AOTAutograd makes gets the overload without gradients:
    it runs under torch.no_grad(), where the operator would come here at every call."""
    if isinstance(x, FunctionalTensor):
        out_features, _, _, *how = rest
        return no_grad(x, packed, bias, out_features, *how)
    return operator.redispatch(keys & torch._C._after_autograd_keyset, x, packed, bias, *rest)


class _Linear(torch.autograd.Function):
    """``linear`` where x, or a bias of 16 bits, requires a gradient."""

    @staticmethod
    def forward(ctx: Any, run: Any, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(packed)  # an error where it is written before backward
        ctx.rest = rest
        return run(x, packed, bias, *rest)

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
    run = functools.partial(_below_autograd, linear, linear_no_grad, keys)
    if forward_ad._current_level >= 0:  # raises where an input has a tangent: there is no formula
        return _Linear.apply(run, x, packed, bias, *rest)
    if not torch.is_grad_enabled():
        return run(x, packed, bias, *rest)
    return _linear_with_gradient(run, x, packed, bias, *rest)


def _linear_with_gradient(run, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
    """``linear`` in grad mode; ``run`` computes it without."""
    trains_bias = bias is not None and bias.requires_grad
    if x.requires_grad or (trains_bias and bias.itemsize == 2):
        return _Linear.apply(run, x, packed, bias, *rest)
    if trains_bias:
        return run(x, packed, None, *rest) + bias
    return run(x, packed, bias, *rest)


class _Conv1x1(torch.autograd.Function):
    """``conv1x1`` where x or the bias requires a gradient."""

    @staticmethod
    def forward(ctx: Any, run: Any, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(packed)
        ctx.rest = rest
        return run(x, packed, bias, *rest)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (packed,), (*rest, spatial) = ctx.saved_tensors, ctx.rest
        rows = grad.movedim(-spatial - 1, -1)
        grad_x = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_x = linear_backward(rows, packed, *rest).movedim(-1, -spatial - 1)
        if ctx.needs_input_grad[3]:
            grad_bias = rows.reshape(-1, rows.shape[-1]).sum(0)
        return None, grad_x, None, grad_bias, *[None] * len(ctx.rest)


def _conv1x1_autograd(keys, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
    run = functools.partial(_below_autograd, conv1x1, conv1x1_no_grad, keys)
    trains = torch.is_grad_enabled() and _requires_grad(x, bias)
    if forward_ad._current_level >= 0 or trains:
        return _Conv1x1.apply(run, x, packed, bias, *rest)
    return run(x, packed, bias, *rest)


def _requires_grad(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return x.requires_grad or (bias is not None and bias.requires_grad)


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rest = inputs[2:]


def _linear_backward_grad(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (packed,) = ctx.saved_tensors
    return linear(grad, packed, None, *ctx.rest), None, None, None, None, None


torch.library.register_autograd(
    "fxsparse::linear_backward", _linear_backward_grad, setup_context=_save_weight
)


def _under_autocast(operator: Any, x, packed, bias, *rest):  # type: ignore[no-untyped-def]
    """As torch's own layers under autocast: x of any eligible dtype, y in the autocast dtype.

    The multiply itself runs in the weight's own dtype, which is the more exact of the two. As in
    torch, float64 takes no part in autocast.
    """
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        dtype = rest[2]
        eligible = torch.float64 not in (x.dtype, dtype) and x.is_floating_point()
        if not eligible:
            return operator(x, packed, bias, *rest)
        bias = bias.to(dtype) if bias is not None else None
        y = operator(x.to(dtype), packed, bias, *rest)
        return y.to(torch.get_autocast_dtype("cpu"))


_library = torch.library.Library("fxsparse", "IMPL")
for _name, _operator, _autograd in (
    ("linear", linear, _linear_autograd),
    ("conv1x1", conv1x1, _conv1x1_autograd),
):
    _library.impl(_name, functools.partial(_under_autocast, _operator), "AutocastCPU")
    _library.impl(_name, _autograd, "Autograd", with_keyset=True)


# ---- without gradients --------------------------------------------------------------------------

# What OpOverload.__call__ calls in turn, 0.25 us later.
_linear_no_grad = linear_no_grad._op
_conv1x1_no_grad = conv1x1_no_grad._op


for _name in ("linear.no_grad", "conv1x1.no_grad"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def is_watched(x: torch.Tensor) -> bool:
    """Whether a call is more than its result and the gradient of that: where somebody records it,
    changes what it does, or wants tangents."""
    return (
        is_compiling()  # first: Dynamo does not know all that follows
        or type(x) is not torch.Tensor
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
    )


def run_linear(  # type: ignore[no-untyped-def]
    x, packed, bias, out_features, in_features, dtype, threads, more=False
) -> torch.Tensor:
    """``linear``, by the overload that costs less where that gives the same: at 64x64 a call takes
    3.2 us instead of 3.8, under torch.no_grad() of 7."""
    if is_watched(x):
        return linear(x, packed, bias, out_features, in_features, dtype, threads, more)
    if torch.is_grad_enabled() and _requires_grad(x, bias):
        rest = (out_features, in_features, dtype, threads, more)
        return _linear_with_gradient(run_linear, x, packed, bias, *rest)
    if more and threads != 1:
        return _linear_no_grad(x, packed, bias, out_features, threads, True)
    if threads:
        return _linear_no_grad(x, packed, bias, out_features, threads)
    return _linear_no_grad(x, packed, bias, out_features)


def run_conv1x1(  # type: ignore[no-untyped-def]
    x, packed, bias, out_channels, in_channels, dtype, threads, spatial
) -> torch.Tensor:
    """``conv1x1``, by the overload that costs less where that gives the same."""
    if is_watched(x):
        return conv1x1(x, packed, bias, out_channels, in_channels, dtype, threads, spatial)
    if torch.is_grad_enabled() and _requires_grad(x, bias):
        rest = (out_channels, in_channels, dtype, threads, spatial)
        return _Conv1x1.apply(run_conv1x1, x, packed, bias, *rest)
    return _conv1x1_no_grad(x, packed, bias, out_channels, threads, spatial)


#: The functions that call these operators.
QUICK: dict[Any, Any] = {linear: run_linear, conv1x1: run_conv1x1}
