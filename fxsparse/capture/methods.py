"""Methods that may be traced apart from the rest of a module which as a whole cannot."""

from __future__ import annotations

import ast
import functools
import inspect
import types

import torch

from .reads import codes_of, self_name
from .source import source_of

#: What :func:`_attributes` finds where a method does more with the module than read its attributes.
_WHOLE = ""


def separate_methods(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The methods that forward runs and that have some children for themselves, each with the part of
    ``module`` that it is about: a module of its class with these children only."""
    found: dict[str, torch.nn.Module] = {}
    for name, code in _methods(type(module)).items():  # type: ignore[arg-type]
        # The names of the code are looked at first: most methods have nothing to do with children.
        if module._modules.keys().isdisjoint(code.co_names):
            continue
        attributes, elsewhere = _who_reads(type(module), code)  # type: ignore[arg-type]
        children = {n: module._modules[n] for n in module._modules if n in attributes}
        held = {*module._parameters, *module._buffers, _WHOLE}
        if children and attributes.isdisjoint(held) and elsewhere.isdisjoint(children):
            found[name] = _part(module, children)
    return found


def _part(module: torch.nn.Module, children: dict[str, torch.nn.Module | None]) -> torch.nn.Module:
    part = type(module).__new__(type(module))
    part.__dict__.update(module.__dict__, _modules=children, _parameters={}, _buffers={})
    return part


@functools.lru_cache(maxsize=1024)
def _methods(cls: type) -> dict[str, types.CodeType]:
    """The methods of a class that its forward names, as they are: not wrapped, bound or computed."""
    forward = inspect.getattr_static(cls, "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    named = code.co_names if code is not None else ()
    found = {}
    for name in named:
        function = inspect.getattr_static(cls, name, None)
        is_plain = isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")
        if is_plain and not hasattr(torch.nn.Module, name):
            found[name] = function.__code__
    return found


@functools.lru_cache(maxsize=1024)
def _who_reads(cls: type, code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes of the module that a method reads, and those that the other methods read."""
    try:
        others = [_attributes(other) for other in codes_of(cls) if other is not code]
        return _attributes(code), frozenset().union(*others)
    except ValueError:
        return frozenset([_WHOLE]), frozenset()


@functools.lru_cache(maxsize=4096)
def _attributes(code: types.CodeType) -> frozenset[str]:
    found, whole = set(), 0
    for function in source_of(code):
        name = self_name(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in (name, "super"):
                whole += 1
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == name:
                found.add(node.attr)
                whole -= 1
    return frozenset([*found, _WHOLE] if whole else found)
