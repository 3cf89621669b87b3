"""What the passes after ``rewrite`` share: calls of the operator, and what may change places with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxsparse import ops
from fxsparse.epilogues import find_module
from fxsparse.fused import linear_with, mlp_with
from fxsparse.stand_in.weight_view import stand_in

from .kinds import has_hooks
from .record import META

# Updates that Python has statements for, by the names of their functions.
_STATEMENTS = """
    delattr delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub
    itruediv ixor setattr setitem
"""
_UPDATES = frozenset(_STATEMENTS.split())
#: Where functions come from that do nothing but compute, unless their name or arguments say so.
_KNOWN = frozenset(
    ["torch", "torch._C._nn", "torch.nn.functional", "_operator", "builtins", "math"]
)


@dataclass(frozen=True)
class LinearCall:
    """The arguments of a call of ``ops.linear``."""

    x: fx.Node
    packed: fx.Node
    bias: fx.Node | None
    out_features: int
    in_features: int
    dtype: torch.dtype
    threads: int


def linear_call(node: Any) -> LinearCall | None:
    """The call that ``node`` is; None where it is none."""
    if not isinstance(node, fx.Node) or node.target is not ops.linear:
        return None
    return LinearCall(*node.args[:7])  # type: ignore[arg-type]


def check_rewritten(graph_module: fx.GraphModule) -> None:
    """Raises where a multiply by a packed weight is not a call of the operator yet."""
    for node in graph_module.graph.nodes:
        multiply = node.meta.get(META)
        if multiply is not None and multiply.call is not None:
            raise ValueError(
                f"{node.name}: expected a graph that the pass Rewrite has been through"
            )


def is_used_once(node: fx.Node) -> bool:
    """Whether one other node takes ``node``, as one of its arguments."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    taken: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), taken.append)
    return taken.count(node) == 1


def can_move(
    graph_module: fx.GraphModule, first: fx.Node, last: fx.Node, own: Collection[fx.Node] = ()
) -> bool:
    """Whether what ``first`` reads is the same at the place of ``last``, further down: nothing between
    them but ``own`` may write."""
    node = first.next
    while node is not last:
        if node not in own and may_write(graph_module, node):
            return False
        node = node.next
    return True


def may_write(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node may write to memory that is there already, or change a mode such as that of
    gradients. A function or module that is not known may."""
    target = node.target
    if node.op == "call_module":
        module = graph_module.get_submodule(str(target))
        known = type(module).__module__.startswith(("torch.nn.", "fxsparse.modules"))
        known = known or find_module(module, torch.float32) is not None
        is_pure = known and not has_hooks(module) and not next(module.children(), None)
        return not is_pure or bool(getattr(module, "inplace", False))
    if (
        node.op == "call_method"
    ):  # what a tensor has not is the method of an argument of another type
        return _updates(str(target)) or not hasattr(torch.Tensor, str(target))
    if node.op != "call_function" or target in (linear_with, mlp_with, stand_in):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if getattr(target, "__module__", None) not in _KNOWN or "out" in node.kwargs:
        return True
    return _updates(target.__name__) or _in_place(node)  # type: ignore[union-attr]


def _updates(name: str) -> bool:
    """Whether a name is that of an update: ``add_``, ``__iadd__``, ``setitem``."""
    return name.strip("_") in _UPDATES or (name.endswith("_") and not name.endswith("__"))


def _in_place(node: fx.Node) -> bool:
    """Whether a function such as ``F.relu`` is told to write to its input."""
    place = _place_of_inplace(node.target)
    if place is None:
        return False
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("inplace"))


@functools.lru_cache(maxsize=1024)
def _place_of_inplace(function: Any) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None
