"""Graphs of the largest submodules that can be traced, where a model as a whole cannot.

The submodule keeps its class, its attributes and its children; only its ``forward`` on the object
becomes a :class:`GraphForward`. The graph is a faster way, not the only one: where somebody has hooked
or replaced a child since, the class's own forward runs, over the packed children.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _forward_from_src
from torch.nn.modules import module as torch_module

from ..modules import HOOKS
from ..stand_in.weight_view import WeightView
from .quick import quick_forward
from .trust import GLOBAL_HOOKS, doubts_before_tracing

_GLOBAL_HOOKS = [getattr(torch_module, name) for name in GLOBAL_HOOKS]


class GraphForward:
    """The ``forward`` of one module by its rewritten graph."""

    def __init__(self, owner: torch.nn.Module, graph: fx.Graph) -> None:
        self.owner = owner
        self.graph: fx.Graph | None = graph
        below = [m for m in owner.modules() if m is not owner]
        self.hooks = [getattr(module, hooks) for module in below for hooks in HOOKS]
        self.state = [_State(module, module is owner) for module in owner.modules()]
        self.run = _function(owner, graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.stands():
            return type(self.owner).forward(self.owner, *args, **kwargs)
        return self.run(self.owner, *args, **kwargs)

    def stands(self) -> bool:
        """Whether neither the module nor one below it was hooked, replaced or given another attribute
        since it was traced. What lies inside an attribute's object is not looked at."""
        if self.graph is None or any(_GLOBAL_HOOKS) or any(self.hooks):
            return False
        return all(state.holds() for state in self.state)

    @property
    def __signature__(self) -> inspect.Signature:
        bound = type(self.owner).forward.__get__(self.owner)
        return inspect.signature(bound)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        result = GraphForward.__new__(GraphForward)
        memo[id(self)] = result
        result.owner = copy.deepcopy(self.owner, memo)
        result.graph = copy.deepcopy(self.graph)
        result.hooks = copy.deepcopy(self.hooks, memo)
        result.state = copy.deepcopy(self.state, memo)
        result.run = self.run
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_graph, (), {"owner": self.owner}


#: What every module has of its own: hooks and flags, of which those that matter are looked at apart.
_COMMON = frozenset([*torch.nn.Module().__dict__, "forward"])


class _State:
    """What a graph took for granted of one module: its class, children, parameters and attributes.

    Whether it is in training matters to dropouts only, which the graph is without: a trace that it
    matters to elsewhere is not trusted."""

    def __init__(self, module: torch.nn.Module, is_owner: bool) -> None:
        self.module, self.is_owner = module, is_owner
        self.kind, self.forward = type(module), type(module).forward
        self.is_dropout = self.kind is torch.nn.Dropout
        own = module.__dict__
        containers: list[Any] = [own["_modules"]]
        self.attributes: list[tuple[str, Any]] = []
        # A module of torch runs itself, or its node has all that it needs of it.
        if not self.kind.__module__.startswith(("torch.", "fxsparse.")):
            self.attributes = [
                (name, value)
                for name, value in own.items()
                if name not in _COMMON and not isinstance(value, WeightView)
            ]
            kinds = (list, dict, set)
            containers += [own["_parameters"], *(v for _, v in self.attributes if type(v) in kinds)]
        self.containers = [(each, tuple(_inside(each))) for each in containers if each]

    def holds(self) -> bool:
        """Whether all that is as it was."""
        module, own = self.module, self.module.__dict__
        if type(module) is not self.kind or self.kind.forward is not self.forward:
            return False
        if not self.is_owner and "forward" in own:
            return False
        if self.is_dropout and module.training:
            return False
        for name, value in self.attributes:
            if own.get(name, _COMMON) is not value:
                return False
        for container, then in self.containers:
            now = _inside(container)
            if len(now) != len(then) or not all(map(operator.is_, now, then)):
                return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        result = _State.__new__(_State)
        result.__dict__.update(self.__dict__)
        result.module = copy.deepcopy(self.module, memo)
        result.attributes = copy.deepcopy(self.attributes, memo)
        result.containers = copy.deepcopy(self.containers, memo)
        return result


def _inside(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _without_graph() -> GraphForward:
    """What pickle makes again: the class's own forward."""
    result = GraphForward.__new__(GraphForward)
    result.graph = None
    return result


def _function(owner: torch.nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    code = graph.python_code("self")
    return quick_forward(owner, graph, _forward_from_src(code.src, code.globals))


def trace_submodules(
    root: torch.nn.Module, trace: Callable[[torch.nn.Module], fx.GraphModule | None]
) -> dict[str, fx.GraphModule]:
    """The graph modules that ``trace`` makes of the largest submodules of ``root``, by their paths."""
    return dict(_trace_children(root, "", trace, set()))


def _trace_children(
    module: torch.nn.Module,
    prefix: str,
    trace: Callable[[torch.nn.Module], fx.GraphModule | None],
    seen: set[int],
) -> Iterator[tuple[str, fx.GraphModule]]:
    for name, child in module._modules.items():
        if child is None or id(child) in seen:
            continue
        seen.add(id(child))
        path = prefix + name
        traced = trace(child) if _is_worth_tracing(child) else None
        if traced is None:
            yield from _trace_children(child, f"{path}.", trace, seen)
        else:
            yield path, traced


def _is_worth_tracing(module: torch.nn.Module) -> bool:
    """Whether a module multiplies by some matrix, and nothing speaks against a trace beforehand."""
    known = type(module).__module__.startswith("torch.") and type(module) is not torch.nn.Sequential
    if known or isinstance(module, fx.GraphModule) or "forward" in module.__dict__:
        return False
    return any(p.dim() >= 2 for p in module.parameters()) and not doubts_before_tracing(module)


def attach(root: torch.nn.Module, graphs: dict[str, fx.GraphModule]) -> None:
    """Have the submodules of ``root`` run by these rewritten graphs."""
    for path, graph_module in graphs.items():
        owner = root.get_submodule(path)
        owner.__dict__["forward"] = GraphForward(owner, graph_module.graph)


def detach(root: torch.nn.Module) -> None:
    """Take back :func:`attach`."""
    for module in root.modules():
        if isinstance(module.__dict__.get("forward"), GraphForward):
            del module.__dict__["forward"]
