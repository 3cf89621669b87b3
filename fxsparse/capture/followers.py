"""Reads in the source of a class which of its children are called one after the other with one tensor.

``query = self.q(x)`` and then ``key = self.k(x)`` may run as one call where ``q`` is asked: nothing in
between leaves the path, gives ``x`` another value or writes to its memory. A reading that is wrong
costs a multiply, not the result: whoever computes ahead compares the tensors when they come.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any

from .reads import FACT_METHODS, FACTS, codes_of, self_name
from .source import source_of

#: Statements that run from their beginning to their end.
_STRAIGHT = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
#: Expressions of which a part may not run, or runs elsewhere.
_BRANCHES = (
    *(ast.IfExp, ast.BoolOp, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
#: What gives names the memory of others.
_BINDS = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr),
    *(ast.For, ast.AsyncFor, ast.comprehension, ast.withitem),
)
_LEAVES = (ast.Yield, ast.YieldFrom, ast.Await)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Stands for what is no local variable: the module itself, globals.
_ELSEWHERE = ""


@functools.lru_cache(maxsize=1024)
def followers(cls: type, children: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """For each of these children of a module of ``cls``, those of them that are called with the same
    tensor after it wherever it is called, in the order of the source. Children without any are left
    out. None of these children may write to what it is called with."""
    sites: dict[str, list[list[str]]] = {}
    try:
        functions = [function for code in codes_of(cls) for function in source_of(code)]
    except ValueError:  # what cannot be read may call them in other ways
        return {}
    for function in functions:
        reader = _Reader(function, children)
        for node in reader.uses:
            sites.setdefault(node.attr, []).append(reader.after(node))
    found = {}
    for name, (first, *others) in sites.items():
        always = [other for other in first if all(other in site for site in others)]
        if always:
            found[name] = tuple(always)
    return found


class _Reader:
    """Looks through one function for calls of ``children``."""

    def __init__(self, function: ast.AST, children: frozenset[str]) -> None:
        self.children = children
        self.self_name = self_name(function)
        nodes = list(ast.walk(function))
        self.parents = {id(child): n for n in nodes for child in ast.iter_child_nodes(n)}
        #: Where a child is called, or given away: where only its attributes are read it does not run.
        uses = (
            node
            for node in nodes
            if isinstance(node, ast.Attribute)
            and self._is_child(node)
            and getattr(self.parents[id(node)], "attr", "forward") == "forward"
        )
        self.uses = sorted(uses, key=_ends)
        arguments = {n.arg for n in nodes if isinstance(n, ast.arg)} - {self.self_name}
        inner = [n for n in nodes if isinstance(n, _FUNCTIONS) and n is not function]
        self.locals = {*arguments, *self._stored(function), *(each.name for each in inner)}
        #: Where names may be given the memory of others: (place, those names, the others).
        self.given: list[tuple[tuple[int, int], set[str], set[str]]] = []
        reads: dict[str, set[str]] = {}  # by inner functions, of what is not their own
        for each in inner:
            own = {n.arg for n in ast.walk(each) if isinstance(n, ast.arg)}
            arguments -= own
            reads[each.name] = {*self._names(each)} - own
            self.given.append((_begins(each), {each.name}, reads[each.name]))
        self.given.append(((0, 0), arguments, {"the caller's"}))
        for node in nodes:
            if isinstance(node, _BINDS):
                self.given.append((_begins(node), {*self._given_to(node)}, {*self._names(node)}))
            elif isinstance(node, ast.Call):  # an object may keep what its method is called with
                names = {*self._names(node)}
                names |= reads.get(getattr(node.func, "id", ""), set())
                self.given.append((_begins(node), names, names))

    def after(self, use: ast.Attribute) -> list[str]:
        """The children that are surely called after this use of one, with the same tensor."""
        call = self.parents[id(use)]
        x = self._argument(call)
        statement = self._straight(call) if x is not None else None
        if x is None or statement is None:
            return []
        found: list[str] = []
        for each in self._from(statement):
            if not isinstance(each, _STRAIGHT) or self._disturbs(each, x):
                break
            calls = [
                node
                for node in self.uses
                if self._argument(outer := self.parents[id(node)]) == x
                and _ends(outer) > _ends(call)
                and self._straight(outer) is each
            ]
            found += [node.attr for node in calls if node.attr not in found]
            if x in self._stored(each) or isinstance(each, ast.Return):
                break
        return [name for name in found if name != use.attr]

    def _is_child(self, node: ast.Attribute) -> bool:
        of_self = isinstance(node.value, ast.Name) and node.value.id == self.self_name
        return of_self and node.attr in self.children

    def _argument(self, call: ast.AST) -> str | None:
        """The name of the one argument of a call of a child."""
        if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1:
            return None
        if not isinstance(call.func, ast.Attribute) or not self._is_child(call.func):
            return None
        return call.args[0].id if isinstance(call.args[0], ast.Name) else None

    def _straight(self, node: ast.AST) -> ast.stmt | None:
        """The statement around an expression; None where the statement may run without it."""
        while not isinstance(node, ast.stmt):
            if isinstance(node, _BRANCHES):
                return None
            node = self.parents[id(node)]
        return node

    def _from(self, statement: ast.stmt) -> list[ast.stmt]:
        """A statement and those after it in its block."""
        for _, block in ast.iter_fields(self.parents[id(statement)]):
            if isinstance(block, list) and any(each is statement for each in block):
                return block[[id(each) for each in block].index(id(statement)) :]
        return []

    def _disturbs(self, statement: ast.stmt, x: str) -> bool:
        """Whether a statement may write to the memory of ``x``, or be left midway."""
        for node in ast.walk(statement):
            if isinstance(node, _LEAVES):
                return True
            if isinstance(node, (ast.Attribute, ast.Subscript)):
                if not isinstance(node.ctx, ast.Load):
                    return True
                name = getattr(node, "attr", "")
                if name.endswith("_") and not name.endswith("__"):  # such as ``mul_``
                    return True
            if isinstance(node, ast.keyword) and node.arg in ("out", "inplace", None):
                return True
        memory = self._memory(statement)
        of_x = memory.get(x, {x})
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        names = {name for call in calls for name in (*self._names(call), self._root(call.func))}
        return any(not of_x.isdisjoint(memory.get(name, {name})) for name in names)

    def _memory(self, at: ast.stmt) -> dict[str, set[str]]:
        """The names whose memory each name may stand for when ``at`` runs."""
        around: ast.AST | None = at
        while around is not None and not isinstance(around, _LOOPS):
            around = self.parents.get(id(around))
        end = _ends(around or at)
        memory = {name: {name} for name in (*self.locals, _ELSEWHERE)}
        changed = True
        while changed:
            changed = False
            for begin, targets, sources in self.given:
                more = set().union(*(memory.get(name, {name}) for name in sources))
                for target in targets if begin < end else ():
                    changed |= not more <= memory[target]
                    memory[target] |= more
        return memory

    def _stored(self, node: ast.AST) -> Iterator[str]:
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and not isinstance(name.ctx, ast.Load):
                yield name.id

    def _given_to(self, node: ast.AST) -> Iterator[str]:
        """The names that a piece of code gives a value, or an attribute or element of them."""
        yield from self._stored(node)
        for part in ast.walk(node):
            is_part = isinstance(part, (ast.Attribute, ast.Subscript))
            if is_part and not isinstance(getattr(part, "ctx", None), ast.Load):
                yield self._root(part)

    def _root(self, node: ast.AST) -> str:
        """The local variable that an expression such as ``a.b[0].c`` begins with."""
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return node.id if isinstance(node, ast.Name) and node.id in self.locals else _ELSEWHERE

    def _names(self, node: ast.AST) -> Iterator[str]:
        """The names whose values a piece of code uses, without those that only a child is called with, or whose shape
        or dtype is asked for."""
        for name in ast.walk(node):
            if not isinstance(name, ast.Name) or name.id not in self.locals:
                continue
            if not isinstance(name.ctx, ast.Load):
                continue
            around = self.parents[id(name)]
            if isinstance(around, ast.Attribute):
                if around.attr in FACTS or around.attr in FACT_METHODS:
                    continue
            elif isinstance(around, ast.Call) and self._argument(around) is not None:
                continue
            yield name.id


def _begins(node: ast.AST) -> tuple[int, int]:
    placed: Any = getattr(node, "target", getattr(node, "context_expr", node))
    return placed.lineno, placed.col_offset


def _ends(node: ast.AST) -> tuple[int, int]:
    """Where a node ends: of two calls in one statement, that which ends first runs first."""
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
