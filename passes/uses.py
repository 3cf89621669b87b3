"""What becomes of a constant in a graph: the nodes that use it, seen through views of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxsparse.capture.reads import LOOK_UPS, Unknown, multiply_use
from fxsparse.capture.region import Region

from .between import operation
from .record import Site

#: Views, by the name of the method or function; those that swap the last two dimensions.
_SWAPS = frozenset(["t", "transpose", "permute", "swapaxes", "T", "mT", "numpy_T"])
_VIEWS = frozenset(["unsqueeze", "squeeze", "expand", "contiguous", "detach", "alias"])
#: Casts, which do nothing where the dtype is the weight's already: a router's, most often.
_CASTS = frozenset(["to", "type", "type_as", "float"])
#: Those that take matrices out of a stack.
_PARTS = frozenset(["select", "narrow", "slice", "getitem", "chunk", "split", "unbind"])
_FACTS = frozenset(["shape", "dtype", "device", "ndim", "size", "dim", "numel", "sym_size"])


@dataclass(frozen=True)
class Use:
    """``user`` takes ``value``, which is the constant, or its transpose where ``swapped``."""

    user: fx.Node
    value: fx.Node
    swapped: bool

    @property
    def name(self) -> str:
        return _name(self.user)

    @property
    def asks_a_fact(self) -> bool:
        """Whether only a shape or dtype is asked for."""
        return self.name in _FACTS


def final_uses(node: fx.Node, stacked: bool, swapped: bool = False) -> Iterator[Use]:
    """The uses of a constant, seen through views of it; ``stacked``: it has three dimensions."""
    seen_through = _VIEWS | _CASTS | (_PARTS if stacked else frozenset())
    for user in node.users:
        name = _name(user)
        is_view = bool(user.args) and user.args[0] is node and user.op != "call_module"
        region = _region(user)
        if region is not None:
            inner = region.body.graph.find_nodes(op="placeholder")[user.args.index(node)]
            yield from final_uses(inner, stacked, swapped)
        elif is_view and name in _SWAPS:
            yield from final_uses(user, stacked, not swapped)
        elif is_view and name in seen_through:
            yield from final_uses(user, stacked, swapped)
        else:
            yield Use(user, node, swapped)


def constant_path(value: object) -> str | None:
    """The path of the constant that ``value`` is, or is a view of; None where it is none."""
    while isinstance(value, fx.Node) and value.op != "get_attr":
        is_view = value.op != "call_module" and _name(value) in _SWAPS | _VIEWS | _PARTS
        value = value.args[0] if is_view and value.args else None
    return str(value.target) if isinstance(value, fx.Node) else None


def _region(node: fx.Node) -> Region | None:
    """The region of an exported graph that a node runs."""
    owner = node.graph.owning_module
    if node.op != "call_module" or owner is None:
        return None
    module = owner.get_submodule(str(node.target))
    return module if isinstance(module, Region) else None


def stand_in_site(use: Use) -> Site | None:
    """The site of a use that the stand-in of a packed weight turns into the operator when it runs;
    None where it would have to rebuild the dense weight."""
    user, places = use.user, _places(use)
    if user.op not in ("call_function", "call_method") or len(places) != 1:
        return None
    (place,) = places
    exported = isinstance(user.target, torch._ops.OpOverload)  # there the weight comes first
    if use.name in LOOK_UPS and place in (0 if exported else 1, "weight"):
        return Site(user.name, node=user, lookup=True)
    try:
        transposed = multiply_use(use.name, place, use.swapped, user.args[0] if user.args else None)
    except Unknown:
        return None
    return None if transposed is None else Site(user.name, transposed, user)


def _places(use: Use) -> list[int | str]:
    """Where among the arguments the value stands; operands of einsum count in a list, too."""
    found: list[int | str] = [name for name, v in use.user.kwargs.items() if v is use.value]
    for i, value in enumerate(use.user.args):
        operands = value if isinstance(value, (list, tuple)) else (value,)
        found += [i + j for j, operand in enumerate(operands) if operand is use.value]
    return found


def _name(node: fx.Node) -> str:
    if node.target is getattr:
        return str(node.args[1])
    return operation(node.target)
