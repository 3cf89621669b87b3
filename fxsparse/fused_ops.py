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
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .epilogues import ACTIVATIONS, apply, is_epilogue, joins
from .ops import _check, linear, linear_fused, linears, mlp


def _check_same(what: str, other: Tensor, y: Tensor) -> None:
    if other.shape != y.shape or other.dtype != y.dtype or other.device != y.device:
        raise ValueError(
            f"expected {what} of the result's shape {tuple(y.shape)}, {y.dtype} on {y.device}, got "
            f"{tuple(other.shape)}, {other.dtype} on {other.device}"
        )


def _fake_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, out: int, features: int, dtype: torch.dtype
) -> Tensor:
    _check("x", x, packed, features, dtype)
    if bias is not None:
        _check("bias", bias, packed, out, dtype)
    return x.new_empty((*x.shape[:-1], out))


@torch.library.register_fake("fxsparse::linear_fused")
def _(x, packed, bias, other, out, features, dtype, threads, epilogue, more=False):  # type: ignore[no-untyped-def]
    y = _fake_linear(x, packed, bias, out, features, dtype)
    if not is_epilogue(epilogue):
        raise ValueError(f"expected an epilogue of {list(ACTIVATIONS)}, got {epilogue!r}")
    if joins(epilogue) != (other is not None):
        raise ValueError(f"expected other with add and mul alone, got epilogue {epilogue!r}")
    if other is not None:
        _check_same("other", other, y)
    return y


@torch.library.register_fake("fxsparse::linears")
def _(x, packed, biases, outs, features, dtype, threads, more=False):  # type: ignore[no-untyped-def]
    if not len(packed) == len(biases) == len(outs) or not packed:
        raise ValueError(
            "expected as many biases and out_features as packed weights, at least one, got "
            f"{len(biases)}, {len(outs)}, {len(packed)}"
        )
    return [
        _fake_linear(x, weight, bias, out, features, dtype)
        for weight, bias, out in zip(packed, biases, outs)
    ]


@torch.library.register_fake("fxsparse::mlp")
def _(  # type: ignore[no-untyped-def]
    x, gate, gate_bias, up, up_bias, down, down_bias, residual, features, hidden, out, dtype, threads,
    activation, more=False,
):  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation of {list(ACTIVATIONS)}, got {activation!r}")
    if gate_bias is not None and gate is None:
        raise ValueError("expected gate_bias with gate alone, got it without one")
    if gate is not None:
        _fake_linear(x, gate, gate_bias, hidden, features, dtype)
    middle = _fake_linear(x, up, up_bias, hidden, features, dtype)
    y = _fake_linear(middle, down, down_bias, out, hidden, dtype)
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


def _autograd(operator: Any, apart: Callable[..., Any], keys: Any, *arguments: Any) -> Any:
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(arguments))
    if trains or forward_ad._current_level >= 0:
        return apart(*arguments)
    return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


_library = torch.library.Library("fxsparse", "IMPL")
_OPERATORS: Sequence[tuple[Any, Callable[..., Any]]] = (
    (linear_fused, _apart_linear_fused),
    (linears, _apart_linears),
    (mlp, _apart_mlp),
)
for _operator, _apart in _OPERATORS:
    _name = _operator._schema.name.split("::")[1]
    _library.impl(_name, _apart, "AutocastCPU")
    _library.impl(
        _name, functools.partial(_autograd, _operator, _apart), "Autograd", with_keyset=True
    )
