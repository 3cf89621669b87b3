"""Fake, autograd and autocast kernels of the operators that do more than one multiply.

``linear_fused(x, packed, bias, other, ..., epilogue)`` is ``linear`` and then an activation, a sum or
product with ``other`` (of y's shape and dtype), or both: ``epilogue`` is ``"<activation>"``, ``"add"``,
``"mul"``, ``"<activation> add"`` or ``"<activation> mul"``. Activations are those of
``fxsparse.epilogues``; each step is rounded to the dtype as torch's operators would.

``linears(x, packed, biases, ...)`` multiplies one x by several weights of the same ``in_features``.
Every result is a tensor of its own.

``mlp(x, gate, gate_bias, up, up_bias, down, down_bias, residual, ...)`` is
``down(activation(up(x)))``, with ``gate`` ``down(activation(gate(x)) * up(x))``, and with ``residual``
that is added.

Where a gradient is needed, and under autocast, each becomes ``linear`` and torch's own operators.

``linear_fused.no_grad``, ``linears.no_grad`` and ``mlp.no_grad`` are the same without gradients, and take
fewer arguments; :func:`run_linear_fused`, :func:`run_linears` and :func:`run_mlp` call the one or the
other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .epilogues import ACTIVATIONS, apply, is_epilogue, joins
from .ops import QUICK, _fake_linear, is_watched, linear, linear_fused, linears, mlp


def _check_same(what: str, other: Tensor, y: Tensor) -> None:
    if other.shape != y.shape or other.dtype != y.dtype or other.device != y.device:
        raise ValueError(
            f"expected {what} of the result's shape {tuple(y.shape)}, {y.dtype} on {y.device}, got "
            f"{tuple(other.shape)}, {other.dtype} on {other.device}"
        )


@torch.library.register_fake("fxsparse::linear_fused")
def _fake_linear_fused(x, packed, bias, other, out, features, dtype, threads, epilogue, more=False):  # type: ignore[no-untyped-def]
    y = _fake_linear(x, packed, bias, out, features, dtype, threads)
    if not is_epilogue(epilogue):
        raise ValueError(f"expected an epilogue of {list(ACTIVATIONS)}, got {epilogue!r}")
    if joins(epilogue) != (other is not None):
        raise ValueError(f"expected other with add and mul alone, got epilogue {epilogue!r}")
    if other is not None:
        _check_same("other", other, y)
    return y


@torch.library.register_fake("fxsparse::linears")
def _fake_linears(x, packed, biases, outs, features, dtype, threads, more=False):  # type: ignore[no-untyped-def]
    if not len(packed) == len(biases) == len(outs) or not packed:
        raise ValueError(
            "expected as many biases and out_features as packed weights, at least one, got "
            f"{len(biases)}, {len(outs)}, {len(packed)}"
        )
    return [
        _fake_linear(x, weight, bias, out, features, dtype, threads)
        for weight, bias, out in zip(packed, biases, outs)
    ]


@torch.library.register_fake("fxsparse::mlp")
def _fake_mlp(  # type: ignore[no-untyped-def]
    x, gate, gate_bias, up, up_bias, down, down_bias, residual, features, hidden, out, dtype, threads,
    activation, more=False,
):  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation of {list(ACTIVATIONS)}, got {activation!r}")
    if gate_bias is not None and gate is None:
        raise ValueError("expected gate_bias with gate alone, got it without one")
    if gate is not None:
        _fake_linear(x, gate, gate_bias, hidden, features, dtype, threads)
    middle = _fake_linear(x, up, up_bias, hidden, features, dtype, threads)
    y = _fake_linear(middle, down, down_bias, out, hidden, dtype, threads)
    if residual is not None:
        _check_same("residual", residual, y)
    return y


@torch.library.register_fake("fxsparse::linear_fused.no_grad")
def _(x, packed, bias, other, out, threads, epilogue, more=False):  # type: ignore[no-untyped-def]
    sizes = (out, x.shape[-1], x.dtype, threads)
    return _fake_linear_fused(x, packed, bias, other, *sizes, epilogue, more)


@torch.library.register_fake("fxsparse::linears.no_grad")
def _(x, packed, biases, outs, threads, more=False):  # type: ignore[no-untyped-def]
    return _fake_linears(x, packed, biases, outs, x.shape[-1], x.dtype, threads, more)


@torch.library.register_fake("fxsparse::mlp.no_grad")
def _(  # type: ignore[no-untyped-def]
    x, gate, gate_bias, up, up_bias, down, down_bias, residual, out, threads, activation, more=False
):  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation of {list(ACTIVATIONS)}, got {activation!r}")
    y = x.new_empty((*x.shape[:-1], out))
    if residual is not None:
        _check_same("residual", residual, y)
    return y


# ---- by the operators they stand for ------------------------------------------------------------


def _apart_linear_fused(  # type: ignore[no-untyped-def]
    x, packed, bias, other, out, features, dtype, threads, epilogue, more=False
) -> Tensor:
    return apply(epilogue, linear(x, packed, bias, out, features, dtype, threads), other)


def _apart_linears(  # type: ignore[no-untyped-def]
    x, packed, biases, outs, features, dtype, threads, more=False
) -> list[Tensor]:
    return [
        linear(x, weight, bias, out, features, dtype, threads)
        for weight, bias, out in zip(packed, biases, outs)
    ]


def _apart_mlp(  # type: ignore[no-untyped-def]
    x, gate, gate_bias, up, up_bias, down, down_bias, residual, features, hidden, out, dtype, threads,
    activation, more=False,
) -> Tensor:  # fmt: skip
    def multiply(x, packed, bias, out, features):  # type: ignore[no-untyped-def]
        return linear(x, packed, bias, out, features, dtype, threads)

    function = ACTIVATIONS[activation].reference
    if gate is None:
        middle = function(multiply(x, up, up_bias, hidden, features))
    else:
        middle = function(multiply(x, gate, gate_bias, hidden, features))
        middle = middle * multiply(x, up, up_bias, hidden, features)
    y = multiply(middle, down, down_bias, out, hidden)
    return y if residual is None else y + residual


def _tensors(arguments: Iterable[Any]) -> Iterable[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _wants_gradient(arguments: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(arguments))


def _autograd(
    operator: Any, no_grad: Any, short: Any, apart: Any, keys: Any, *arguments: Any
) -> Any:
    """``operator`` in torch's autograd; ``apart`` is what it stands for, ``no_grad`` its overload
    without gradients, which takes what ``short`` leaves of the arguments."""
    if forward_ad._current_level >= 0 or _wants_gradient(arguments):
        return apart(*arguments)
    # As for ``linear``, a graph of AOTAutograd gets the overload without gradients.
    if isinstance(arguments[0], FunctionalTensor):
        return no_grad(*short(*arguments))
    return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def _short_linear_fused(  # type: ignore[no-untyped-def]
    x, packed, bias, other, out, features, dtype, threads, epilogue, more=False
) -> tuple[Any, ...]:
    return x, packed, bias, other, out, threads, epilogue, more


def _short_linears(  # type: ignore[no-untyped-def]
    x, packed, biases, outs, features, dtype, threads, more=False
) -> tuple[Any, ...]:
    return x, packed, biases, outs, threads, more


def _short_mlp(  # type: ignore[no-untyped-def]
    x, gate, gate_bias, up, up_bias, down, down_bias, residual, features, hidden, out, dtype, threads,
    activation, more=False,
) -> tuple[Any, ...]:  # fmt: skip
    weights = (gate, gate_bias, up, up_bias, down, down_bias)
    return x, *weights, residual, out, threads, activation, more


def _knows_no_lists() -> bool:
    """Whether what watches the calls refuses lists of tensors: torch.jit.trace and vmap do."""
    if is_compiling():
        return False
    by_jit = torch._C._get_tracing_state() is not None
    return by_jit or torch._C._are_functorch_transforms_active()


def _quick(operator: Any, no_grad: Any, short: Callable[..., tuple], apart: Callable) -> Callable:
    """What calls ``operator``, by the overload that costs less where that gives the same."""
    run_no_grad = no_grad._op

    def run(*arguments: Any) -> Any:
        if is_watched(arguments[0]):
            return (apart if _knows_no_lists() else operator)(*arguments)
        if _wants_gradient(arguments):
            return apart(*arguments)
        return run_no_grad(*short(*arguments))

    return run


_library = torch.library.Library("fxsparse", "IMPL")


def _complete(name: str, operator: Any, short: Callable[..., tuple], apart: Callable) -> Callable:
    """Registers the kernels of an operator; gives the function that calls it."""
    no_grad = getattr(torch.ops.fxsparse, name).no_grad
    autograd = functools.partial(_autograd, operator, no_grad, short, apart)
    _library.impl(name, apart, "AutocastCPU")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    _library.impl(f"{name}.no_grad", torch.library.fallthrough_kernel, "Autograd")
    run = QUICK[operator] = _quick(operator, no_grad, short, apart)
    return run


def _without_negations(operator: Any, keys: Any, x, packed, biases, *rest):  # type: ignore[no-untyped-def]
    """``linears`` of lazily negated tensors; torch's own kernel for them forgets those of ``biases``."""
    biases = [None if bias is None else bias.resolve_neg() for bias in biases]
    packed = [weight.resolve_neg() for weight in packed]
    return operator(x.resolve_neg(), packed, biases, *rest)


for _linears in (linears, torch.ops.fxsparse.linears.no_grad):
    _kernel = functools.partial(_without_negations, _linears)
    _library.impl(_linears.name().split("::")[1], _kernel, "Negative", with_keyset=True)

run_linear_fused = _complete("linear_fused", linear_fused, _short_linear_fused, _apart_linear_fused)
run_linears = _complete("linears", linears, _short_linears, _apart_linears)
run_mlp = _complete("mlp", mlp, _short_mlp, _apart_mlp)
