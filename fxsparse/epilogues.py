"""The activations that ``linear_fused`` and ``mlp`` know, and what of torch each of them equals.

The names are the core's (``kernel/isa/activations.inc``); the tests hold every one against its
reference here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._native import _C

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """One activation: ``reference(x)`` is what it computes, rounded as the reference rounds.

    ``functions``, ``methods`` and ``modules`` compute just that when called on one tensor (and
    ``inplace``, which says where the result goes). ``classes`` are modules of other packages, by
    name; ``stepwise`` ones, too, but they round after each of several steps, so that in 16 bits
    they are not the same.
    """

    reference: Callable[[Tensor], Tensor]
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    classes: tuple[str, ...] = ()
    stepwise: tuple[str, ...] = ()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


ACTIVATIONS = {
    "relu": Activation(torch.relu, (torch.relu, F.relu, aten.relu.default), ("relu",), (nn.ReLU,)),
    "relu6": Activation(F.relu6, (F.relu6, aten.relu6.default), (), (nn.ReLU6,)),
    "relu_squared": Activation(
        _relu_squared, classes=("transformers.activations.ReLUSquaredActivation",)
    ),
    "hardswish": Activation(
        F.hardswish, (F.hardswish, aten.hardswish.default), (), (nn.Hardswish,)
    ),
    # F.gelu and nn.GELU have a parameter: see find_function and find_module.
    "gelu": Activation(F.gelu),
    "gelu_tanh": Activation(
        _gelu_tanh,
        stepwise=(
            "transformers.activations.NewGELUActivation",
            "transformers.activations.FastGELUActivation",
            "transformers.activations.AccurateGELUActivation",
        ),
    ),
    "quick_gelu": Activation(
        _quick_gelu, classes=("transformers.activations.QuickGELUActivation",)
    ),
    "silu": Activation(
        F.silu,
        (F.silu, aten.silu.default),
        (),
        (nn.SiLU,),
        ("transformers.activations.SiLUActivation",),
    ),
    "sigmoid": Activation(
        torch.sigmoid, (torch.sigmoid, F.sigmoid, aten.sigmoid.default), ("sigmoid",), (nn.Sigmoid,)
    ),
    "tanh": Activation(torch.tanh, (torch.tanh, F.tanh, aten.tanh.default), ("tanh",), (nn.Tanh,)),
}
assert list(ACTIVATIONS) == _C.activations(), "epilogues.py and activations.inc differ"

#: ``y <- y + other`` and ``y <- y * other``, alone or after an activation.
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul}

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}
_FUNCTIONS = {f: name for name, entry in ACTIVATIONS.items() for f in entry.functions}
_METHODS = {m: name for name, entry in ACTIVATIONS.items() for m in entry.methods}
_MODULES = {m: name for name, entry in ACTIVATIONS.items() for m in entry.modules}
_CLASSES = {c: name for name, entry in ACTIVATIONS.items() for c in entry.classes}
# Modules that call their ``act``, which may be a function of torch or their own method.
_WRAPPERS = ("transformers.activations.GELUActivation", "transformers.activations.GELUTanh")
_STEPWISE = {c: name for name, entry in ACTIVATIONS.items() for c in entry.stepwise}


def find_function(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The activation that a call of a function or of a tensor's method (``target`` is its name) is.

    ``args[0]`` is the tensor. None if it is none, or has arguments that make it another.
    """
    kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
    if target in (F.gelu, aten.gelu.default):
        form = kwargs.pop("approximate", "none")
        return _GELU.get(form) if len(args) == 1 and not kwargs else None
    if isinstance(target, str):
        name = _METHODS.get(target)
    else:
        name = _FUNCTIONS.get(target) if callable(target) else None
    # What may follow the tensor is ``inplace``.
    return name if len(args) <= 2 and not kwargs else None


def find_module(module: nn.Module, dtype: torch.dtype) -> str | None:
    """The activation that ``module`` is for tensors of ``dtype``; None if it is none."""
    kind = type(module)
    if isinstance(module, nn.GELU):
        return _GELU.get(module.approximate) if kind is nn.GELU else None
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _WRAPPERS:
        function: Any = module.act
        kwargs: dict[str, Any] = {}
        if isinstance(function, functools.partial):
            function, kwargs = function.func, function.keywords
        return find_function(function, (None,), kwargs)
    if dtype.itemsize > 2 and name in _STEPWISE:
        return _STEPWISE[name]
    return _MODULES.get(kind) or _CLASSES.get(name)


def apply(epilogue: str, y: Tensor, other: Tensor | None) -> Tensor:
    """What ``linear_fused`` does to y, by torch's own operators."""
    for word in epilogue.split(" "):
        if word in JOINS:
            assert other is not None
            y = JOINS[word](y, other)
        else:
            y = ACTIVATIONS[word].reference(y)
    return y


def is_epilogue(epilogue: str) -> bool:
    """Whether ``linear_fused`` knows it."""
    words = epilogue.split(" ")
    if len(words) == 2:
        return words[0] in ACTIVATIONS and words[1] in JOINS
    return len(words) == 1 and (words[0] in ACTIVATIONS or words[0] in JOINS)


def joins(epilogue: str) -> bool:
    """Whether it takes another tensor."""
    return epilogue.split(" ")[-1] in JOINS
