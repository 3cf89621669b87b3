"""Every spelling of a multiply by a constant weight, as one table.

A weight counts as constant in dense form and, once installed, in packed form. ``read(graph_module, node)`` gives the canonical form ``y = x @ W.T + bias`` or None;
:class:`Normalise` notes it in the node's meta. Nothing is rewritten here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxsparse.modules import SparseModule
from fxsparse.packing import SUFFIX

from .kinds import has_hooks, is_plain, operation
from .record import META, Multiply


@dataclass(frozen=True)
class Operands:
    """The parts of one multiply; ``added`` is what is added to the product, if anything."""

    multiply: Multiply
    x: Any
    added: Any = None


@dataclass(frozen=True)
class Spelling:
    """``names``: the arguments in order; ``weight`` and ``x``: which of them; ``flip``: y = x @ W;
    ``spatial``: dimensions of the images of a convolution."""

    op: str
    names: tuple[str, ...]
    x: str
    weight: str
    flip: bool
    added: str = ""
    spatial: int = 0


_aten = torch.ops.aten
_LINEAR = Spelling("linear", ("input", "weight", "bias"), "input", "weight", False, added="bias")
_MATMUL = Spelling("matmul", ("input", "other"), "input", "other", True)
_MM = Spelling("mm", ("input", "mat2"), "input", "mat2", True)
_ADDMM = Spelling("addmm", ("input", "mat1", "mat2"), "mat1", "mat2", True, added="input")
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV1D = Spelling("conv1d", _CONV, "input", "weight", False, added="bias", spatial=1)
_CONV2D = Spelling("conv2d", _CONV, "input", "weight", False, added="bias", spatial=2)

FUNCTIONS: dict[Callable[..., Any], Spelling] = {
    torch.nn.functional.linear: _LINEAR,
    torch.matmul: _MATMUL,
    operator.matmul: _MATMUL,
    torch.mm: _MM,
    torch.addmm: _ADDMM,
    torch.conv1d: _CONV1D,
    torch.conv2d: _CONV2D,
    _aten.linear.default: _LINEAR,
    _aten.matmul.default: _MATMUL,
    _aten.mm.default: _MM,
    _aten.addmm.default: _ADDMM,
    _aten.conv1d.default: _CONV1D,
    _aten.conv2d.default: _CONV2D,
}
METHODS: dict[str, Spelling] = {
    "matmul": _MATMUL,
    "__matmul__": _MATMUL,
    "mm": _MM,
    "addmm": _ADDMM,
}

#: Views that swap the two dimensions of a matrix, with the arguments they need for that.
_SWAPS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "t": ((),),
    "transpose": ((0, 1), (1, 0), (-1, -2), (-2, -1)),
    "permute": ((1, 0), ((1, 0),)),
}
_SWAP_ATTRIBUTES = ("T", "mT")
_VIEW_FUNCTIONS: dict[Callable[..., Any], str] = {
    torch.t: "t",
    torch.transpose: "transpose",
    torch.permute: "permute",
    _aten.t.default: "t",
    _aten.numpy_T.default: "t",
    _aten.mT.default: "t",
    _aten.transpose.int: "transpose",
    _aten.permute.default: "permute",
    _aten.alias.default: "alias",
    _aten.contiguous.default: "contiguous",
    _aten.detach.default: "detach",
}
_SAME = ("alias", "contiguous", "detach")


class Normalise(PassBase):
    """Notes in ``node.meta[META]`` which nodes multiply by a constant weight, and how."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        for node in graph_module.graph.nodes:
            operands = read(graph_module, node)
            if operands is not None:
                node.meta[META] = operands.multiply
        return PassResult(graph_module, False)


def read(graph_module: fx.GraphModule, node: fx.Node) -> Operands | None:
    """The multiply that ``node`` is, if its weight is a parameter or buffer of the module: a matrix,
    or that of a 1x1 convolution."""
    if node.op == "call_module":
        return _read_module(graph_module, node)
    spelling = None
    if node.op == "call_function":
        spelling = FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    elif node.op == "call_method":
        spelling = METHODS.get(str(node.target))
    if spelling is None:
        return None
    arguments = _bind(spelling, node)
    if arguments is None or not isinstance(arguments[spelling.x], fx.Node):
        return None
    found = _constant(graph_module, arguments.get(spelling.weight), spelling.spatial)
    added = arguments.get(spelling.added)
    if found is None or (spelling.spatial and not _is_1x1(arguments)):
        return None
    path, swapped = found
    multiply = Multiply(path, spelling.op, swapped != spelling.flip, spelling.spatial)
    return Operands(multiply, arguments[spelling.x], added)


def _is_1x1(arguments: dict[str, Any]) -> bool:
    """Whether a convolution with a 1x1 kernel keeps every pixel and mixes all channels."""

    def has(name: str, value: int) -> bool:
        given = arguments.get(name, value)
        return given == value or (
            isinstance(given, (tuple, list)) and all(one == value for one in given)
        )

    padding = arguments.get("padding") in ("valid", "same") or has("padding", 0)
    return padding and has("stride", 1) and has("groups", 1)


def _read_module(graph_module: fx.GraphModule, node: fx.Node) -> Operands | None:
    module = graph_module.get_submodule(str(node.target))
    if not is_plain(module) and not (isinstance(module, SparseModule) and not has_hooks(module)):
        return None
    x = node.args[0] if node.args else node.kwargs.get("input")
    spatial = len(getattr(module, "kernel_size", ()))
    return Operands(Multiply(f"{node.target}.weight", operation(module), spatial=spatial), x)


def _bind(spelling: Spelling, node: fx.Node) -> dict[str, Any] | None:
    """Arguments by name; None where there are more than the spelling knows (``out=``, ``beta=``)."""
    arguments = dict(zip(spelling.names, node.args))
    arguments.update(node.kwargs)
    extra = set(arguments) - set(spelling.names)
    known = extra <= {"beta", "alpha"} and all(arguments[name] == 1 for name in extra)
    complete = len(node.args) <= len(spelling.names) and {spelling.x, spelling.weight} <= set(
        arguments
    )
    return arguments if known and complete else None


def _constant(graph_module: fx.GraphModule, value: Any, spatial: int) -> tuple[str, bool] | None:
    """The path of the parameter or buffer that ``value`` is, and whether it is seen transposed."""
    if not isinstance(value, fx.Node):
        return None
    swapped = False
    while value.op != "get_attr":
        swap = _swaps(value)
        if swap is None or (swap and spatial):
            return None
        swapped ^= swap
        value = value.args[0]
        if not isinstance(value, fx.Node):
            return None
    path = str(value.target)
    tensor = attribute(graph_module, path)
    if attribute(graph_module, path + SUFFIX) is not None:
        return path, swapped
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 + spatial:
        return None
    return (path, swapped) if all(size == 1 for size in tensor.shape[2:]) else None


def attribute(module: torch.nn.Module, path: str) -> Any:
    """The attribute at a dotted path; None where there is none."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _swaps(node: fx.Node) -> bool | None:
    """Whether a view of a matrix swaps its dimensions; None where it is another operation."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    name, rest = str(node.target), tuple(map(_hashable, node.args[1:]))
    if node.op == "call_function":
        if node.target is getattr:
            return True if rest[0] in _SWAP_ATTRIBUTES else None
        name = _VIEW_FUNCTIONS.get(node.target, "")  # type: ignore[arg-type]
    elif node.op != "call_method":
        return None
    if node.kwargs:
        return None
    if name in _SAME and not rest:
        return False
    return True if rest in _SWAPS.get(name, ()) else None


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument
