"""Finds the source of a function as a syntax tree, and what it says about parameters."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from typing import Any

_PARAMETERS = frozenset(
    [
        "parameters",
        "named_parameters",
        "_parameters",
        "get_parameter",
        "state_dict",
        "functional_call",
    ]
)


def source_of(code: types.CodeType) -> list[ast.AST]:
    """The functions and lambdas that begin where ``code`` does.

    Raises ``ValueError`` where there is no source, or where it is not what runs: a file may have been
    edited since it was imported.
    """
    try:
        source = "".join(inspect.findsource(code)[0])
        functions = _functions(source)[code.co_firstlineno]
        compiled = _compiled(source, code.co_filename)
    except (OSError, TypeError, SyntaxError, ValueError, KeyError):
        raise ValueError("cannot be read") from None
    if _essence(code) not in compiled:
        raise ValueError("is not what runs")
    return functions


@functools.lru_cache(maxsize=4096)
def reads_parameters(code: types.CodeType) -> str | None:
    """``"all"`` where a function goes through a module's parameters, which packing changes, ``"first"``
    where it only looks at the first one (``next(self.parameters())``), else None."""
    try:
        functions = source_of(code)
    except ValueError:
        return None
    nodes = [node for function in functions for node in ast.walk(function)]
    firsts = {
        id(node.args[0].func)
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "next"
        and node.args
        and isinstance(node.args[0], ast.Call)
    }
    found = None
    for node in nodes:
        name = getattr(node, "attr", getattr(node, "id", None))
        if name in _PARAMETERS:
            if id(node) not in firsts:
                return "all"
            found = "first"
    return found


@functools.lru_cache(maxsize=64)
def _functions(source: str) -> dict[int, list[ast.AST]]:
    """The functions and lambdas of a file by the line on which their code begins."""
    functions: dict[int, list[ast.AST]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = getattr(node, "decorator_list", [])
            line = decorators[0].lineno if decorators else node.lineno
            functions.setdefault(line, []).append(node)
    return functions


@functools.lru_cache(maxsize=64)
def _compiled(source: str, file: str) -> set[tuple[Any, ...]]:
    """What makes up every function of a file."""
    found, todo = set(), [compile(source, file, "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        found.add(_essence(code))
        todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found


def _essence(code: types.CodeType) -> tuple[Any, ...]:
    """Where a function begins and what it does. Functions inside it are told apart by their names."""
    constants = tuple(
        constant.co_name if isinstance(constant, types.CodeType) else repr(constant)
        for constant in code.co_consts
    )
    return code.co_firstlineno, code.co_name, code.co_code, code.co_names, constants
