"""Finds the linears that a module which was not traced calls one after the other with the same tensor,
and has them computed by one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..modules import HOOKS, SparseLinear
from ..modules.siblings import Group, SiblingLinear, run_together
from .followers import followers
from .submodules import GLOBAL_HOOK_DICTS, GraphForward, below_graph, signature


class SiblingsForward:
    """The ``forward`` of one module whose linears are computed together.

    It is the class's own that runs. Where somebody has hooked or replaced one of the linears since,
    each computes for itself.
    """

    owner: torch.nn.Module
    _groups: dict[SparseLinear, Group] | None = None

    def __init__(self, owner: torch.nn.Module) -> None:
        self.__setstate__({"owner": owner})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.owner).forward
        if torch.compiler.is_compiling() or not self.stands():
            return forward(self.owner, *args, **kwargs)
        assert self._groups is not None
        return run_together(self._groups, forward, (self.owner, *args), kwargs)

    def stands(self) -> bool:
        """Whether the linears are those that were found, and no hook observes them."""
        if self._groups is None:
            self._find()
        if any(self._hooks) or type(self.owner).forward is not self._forward:
            return False
        if [*map(self.owner._modules.get, self._names)] != self._linears:
            return False
        return not any("forward" in linear.__dict__ for linear in self._linears)

    def _find(self) -> None:
        groups = {
            first: group
            for first, group in find_groups(self.owner).items()
            if all(type(member) is SiblingLinear for member in group.members)
        }
        linears = _linears(self.owner)
        self._forward = type(self.owner).forward
        self._names, self._linears = [*linears], [*linears.values()]
        self._hooks = [getattr(m, hooks) for m in self._linears for hooks in HOOKS]
        self._hooks += GLOBAL_HOOK_DICTS
        self._groups = groups  # last: another thread may look now

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner}  # a copy finds them again, in the source that it will run

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.owner = state["owner"]
        self.__signature__ = signature(type(self.owner).forward)


def find_groups(parent: torch.nn.Module) -> dict[SparseLinear, Group]:
    """The groups of linears of ``parent``, by the one that is asked first."""
    linears = _linears(parent)
    groups: dict[SparseLinear, Group] = {}
    if sum(isinstance(child, SparseLinear) for child in linears.values()) > 1:
        follow = followers(type(parent), frozenset(linears))  # type: ignore[arg-type]
        for name, others in follow.items():
            group = [linears[each] for each in (name, *others)]
            alike = [
                m for m in group if isinstance(m, SparseLinear) and _kind(m) == _kind(group[0])
            ]
            first = group[0]
            # On one thread the look-up takes about what one call for three saves: 3 us.
            if isinstance(first, SparseLinear) and first.threads != 1 and len(alike) > 1:
                groups[first] = Group(alike)
    return groups


def _linears(parent: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The children of ``parent`` that are linears, packed or not, and nothing more."""
    return {
        name: child
        for name, child in parent._modules.items()
        if child is not None
        and type(child) in (torch.nn.Linear, SparseLinear, SiblingLinear)
        and "forward" not in child.__dict__
    }


def _kind(linear: torch.nn.Module) -> tuple[Any, ...]:
    """What must be the same of all that one call computes."""
    return tuple(getattr(linear, name, None) for name in ("in_features", "weight_dtype", "threads"))


def join_siblings(root: torch.nn.Module) -> None:
    """Have siblings below ``root`` computed together, but for those that are part of a graph."""
    found = {m: groups for m in _untraced(root) if (groups := find_groups(m))}
    for module, groups in found.items():
        module.__dict__["forward"] = SiblingsForward(module)
        for group in groups.values():
            for member in group.members:
                member.__class__ = SiblingLinear


def _untraced(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of which the class's own forward runs."""
    traced = {
        id(below)
        for module in root.modules()
        for value in module.__dict__.values()
        if isinstance(value, GraphForward)
        for below in below_graph(value.owner, value.method)
    }
    for module in root.modules():
        if id(module) not in traced and "forward" not in module.__dict__:
            yield module


def part_siblings(root: torch.nn.Module) -> None:
    """Take back :func:`join_siblings`."""
    for module in root.modules():
        if isinstance(module.__dict__.get("forward"), SiblingsForward):
            del module.__dict__["forward"]
        if type(module) is SiblingLinear:
            module.__class__ = SparseLinear  # type: ignore[assignment]
