"""Graphs of the largest submodules that can be traced, where a model as a whole cannot, and of methods
of those that cannot.

The submodule keeps its class, its attributes and its children; only its ``forward`` on the object, or
that method, becomes a :class:`GraphForward`. The graph is a faster way, not the only one: where
somebody has hooked or replaced a child since, the class's own forward runs, over the packed children.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.graph_module import _forward_from_src
from torch.nn.modules import module as torch_module

from ..modules import HOOKS
from ..stand_in.weight_view import WeightView
from .methods import separate_methods
from .quick import quick_forward
from .trust import GLOBAL_HOOKS, doubts_before_tracing

GLOBAL_HOOK_DICTS = [getattr(torch_module, name) for name in GLOBAL_HOOKS]


class Place(NamedTuple):
    """What a graph is of: a method of the submodule at ``path``."""

    path: str
    method: str = "forward"


class GraphForward:
    """The ``forward`` of one module, or another ``method`` of it, by its rewritten graph."""

    def __init__(self, owner: torch.nn.Module, graph: fx.Graph, method: str = "forward") -> None:
        self.owner, self.method = owner, method
        self.graph: fx.Graph | None = graph
        self.function = getattr(type(owner), method)
        self.__signature__ = signature(self.function)
        below = below_graph(owner, method)
        self.hooks = [getattr(module, hooks) for module in below for hooks in HOOKS]
        self.state = [_State(owner, method), *(_State(module) for module in below)]
        self.run = _function(owner, graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.stands():
            return getattr(type(self.owner), self.method)(self.owner, *args, **kwargs)
        return self.run(self.owner, *args, **kwargs)

    def stands(self) -> bool:
        """Whether neither the module nor one below it was hooked, replaced or given another attribute
        since it was traced. What lies inside an attribute's object is not looked at."""
        if self.graph is None or any(GLOBAL_HOOK_DICTS) or any(self.hooks):
            return False
        if getattr(type(self.owner), self.method) is not self.function:
            return False
        return all(state.holds() for state in self.state)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        result = GraphForward.__new__(GraphForward)
        memo[id(self)] = result
        result.owner = copy.deepcopy(self.owner, memo)
        result.method, result.function = self.method, self.function
        result.__signature__ = self.__signature__
        result.graph = copy.deepcopy(self.graph)
        result.hooks = copy.deepcopy(self.hooks, memo)
        result.state = copy.deepcopy(self.state, memo)
        result.run = self.run
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_graph, (), {"owner": self.owner, "method": self.method}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__signature__ = signature(getattr(type(self.owner), self.method))


def signature(method: Callable[..., Any]) -> inspect.Signature:
    """The signature of a method of a class, without the module.

    Kept by what takes the method's place: transformers asks for it at each call.
    """
    whole = inspect.signature(method)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


#: What every module has of its own: hooks and flags, of which those that matter are looked at apart.
_COMMON = frozenset([*torch.nn.Module().__dict__, "forward"])


class _State:
    """What a graph took for granted of one module: its class, children, parameters and attributes, and
    what its method reads of the class.

    Whether it is in training matters to dropouts only, which the graph is without: a trace that it
    matters to elsewhere is not trusted."""

    def __init__(self, module: torch.nn.Module, method: str = "") -> None:
        self.module, self.is_owner = module, bool(method)
        self.kind, self.forward = type(module), type(module).forward
        self.is_dropout = self.kind is torch.nn.Dropout
        own = module.__dict__
        containers: list[Any] = [own["_modules"]]
        self.attributes: list[tuple[str, Any]] = []
        self.of_class: list[tuple[str, Any]] = []
        if self.kind is torch.nn.GELU:
            self.attributes = [("approximate", module.approximate)]
        # A module of torch runs itself, or its node has all that it needs of it.
        if not self.kind.__module__.startswith(("torch.", "fxsparse.")):
            self.attributes = [
                (name, value)
                for name, value in own.items()
                if name not in _COMMON and not isinstance(value, WeightView)
            ]
            names = _class_reads(self.kind, method or "forward")  # type: ignore[arg-type]
            self.of_class = [(name, getattr(self.kind, name)) for name in names if name not in own]
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
        for name, value in self.of_class:
            is_own = name in own and type(own[name]) is not GraphForward
            if is_own or getattr(self.kind, name, None) is not value:
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


@functools.lru_cache(maxsize=1024)
def _class_reads(kind: type, method: str) -> tuple[str, ...]:
    """What a method names of its class, itself or through other methods. Without class methods: they are
    another object each time."""
    held = {name for base in kind.__mro__ for name in vars(base)}
    held.difference_update(dir(torch.nn.Module))
    found, new = {method}, [method]
    while new:
        code = getattr(getattr(kind, new.pop(), None), "__code__", None)
        named = held.intersection(code.co_names) - found if code is not None else set()
        new += named
        found |= named
    return tuple(name for name in found - {method} if getattr(kind, name) is getattr(kind, name))


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


#: Traces a method of a module; None where the trace cannot be trusted.
Trace = Callable[[torch.nn.Module, str], fx.GraphModule | None]


def trace_submodules(root: torch.nn.Module, trace: Trace) -> dict[Place, fx.GraphModule]:
    """The graph modules that ``trace`` makes of the largest submodules of ``root``, and of methods of
    those that it cannot trace."""
    return dict(_trace_children(root, "", trace, set()))


def _trace_children(
    module: torch.nn.Module, prefix: str, trace: Trace, seen: set[int]
) -> Iterator[tuple[Place, fx.GraphModule]]:
    for method, part in separate_methods(module).items():
        traced = None
        if method not in module.__dict__ and _is_worth_tracing(part, method):
            traced = trace(part, method)
        if traced is not None:
            seen.update(map(id, part._modules.values()))
            yield Place(prefix.rstrip("."), method), traced
    for name, child in module._modules.items():
        if child is None or id(child) in seen:
            continue
        seen.add(id(child))
        path = prefix + name
        traced = trace(child, "forward") if _is_worth_tracing(child, "forward") else None
        if traced is None:
            yield from _trace_children(child, f"{path}.", trace, seen)
        else:
            yield Place(path), traced


def _is_worth_tracing(module: torch.nn.Module, method: str) -> bool:
    """Whether a module multiplies by some matrix, and nothing speaks against a trace beforehand."""
    known = type(module).__module__.startswith("torch.") and type(module) is not torch.nn.Sequential
    if known or isinstance(module, fx.GraphModule) or "forward" in module.__dict__:
        return False
    has_matrix = any(p.dim() >= 2 for p in module.parameters())
    return has_matrix and not doubts_before_tracing(module, method)


def below_graph(owner: torch.nn.Module, method: str) -> list[torch.nn.Module]:
    """The modules below ``owner`` that the graph of a method of it stands for."""
    root = owner if method == "forward" else separate_methods(owner)[method]
    return [module for module in root.modules() if module is not root]


def attach(root: torch.nn.Module, graphs: dict[Place, fx.GraphModule]) -> None:
    """Have the submodules of ``root`` run by these rewritten graphs."""
    for (path, method), graph_module in graphs.items():
        owner = root.get_submodule(path)
        owner.__dict__[method] = GraphForward(owner, graph_module.graph, method)


def detach(root: torch.nn.Module) -> None:
    """Take back :func:`attach`."""
    for module in root.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, GraphForward):
                del module.__dict__[name]
