"""Modules that stand in a graph as they are, because a trace through them would freeze a mode.

A dropout or a batch norm of somebody's own does something else in training. As one node that calls the
module it goes on doing so. That is right for a module that keeps nothing between calls but tensors:
what else it changed, other code might have read while it was traced.
"""

from __future__ import annotations

import ast
import functools
import inspect

import torch

from .audit import EFFECTS, reads_training
from .reads import codes_of
from .source import source_of


def stays_whole(module: torch.nn.Module) -> bool:
    """Whether ``module`` is such a one: it reads the training flag, multiplies by no matrix, and it and
    its children set nothing but local variables and tensors."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or not reads_training(code):
        return False
    if any(parameter.dim() >= 2 for parameter in module.parameters()):
        return False
    return all(
        "forward" not in part.__dict__ and _keeps_nothing(type(part))  # type: ignore[arg-type]
        for part in module.modules()
    )


@functools.lru_cache(maxsize=1024)
def _keeps_nothing(kind: type) -> bool:
    try:
        functions = [function for code in codes_of(kind) for function in source_of(code)]
    except ValueError:
        return False
    return not any(map(_changes_something, functions))


def _changes_something(function: ast.AST) -> bool:
    whole = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            return True
        if isinstance(node, ast.Attribute) and node.attr in EFFECTS:
            return True
        if isinstance(node, ast.Name):
            # The module handed on as a whole could be changed elsewhere.
            if node.id in ("setattr", "delattr", "vars"):
                return True
            if node.id == "self" and id(node) not in whole:
                return True
    return False
