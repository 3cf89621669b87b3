"""Reads the source of a forward: does its control flow depend on the module's structure alone?

A trace records one run. It can stand for every run only if no branch, no assignment and no call on
the way depends on, or changes, anything but the tensors in the graph and the module's structure.
:func:`objection` says where a function does more than that. It errs on the side of objecting: the
price is a model that is treated module by module instead of as one graph.
"""

from __future__ import annotations

import ast
import functools
import types

from .source import source_of

#: Builtins whose result is as constant as their arguments.
_PURE = frozenset(
    [
        "len",
        "range",
        "enumerate",
        "zip",
        "reversed",
        "min",
        "max",
        "int",
        "float",
        "bool",
        "str",
        "tuple",
        "list",
        "dict",
        "sorted",
        "isinstance",
        "abs",
        "sum",
        "any",
        "all",
    ]
)
#: Builtins that look at more than the value of a tensor, or make a plain value of it.
_CURIOUS = frozenset(
    [
        "isinstance",
        "issubclass",
        "type",
        "id",
        "callable",
        "int",
        "float",
        "bool",
        "str",
        "repr",
        "format",
        "filter",
        "map",
        "any",
        "all",
        "hasattr",
        "getattr",
    ]
)
#: Builtins with an effect, or whose result is not the same at every call.
_IMPURE = frozenset(
    [
        "setattr",
        "delattr",
        "vars",
        "globals",
        "locals",
        "print",
        "open",
        "input",
        "exec",
        "eval",
        "compile",
        "next",
        "iter",
        "__import__",
        "dir",
    ]
)
#: Methods that change what they are called on, or leave the thread, or take a value out of a tensor.
EFFECTS = frozenset(
    [
        "append",
        "appendleft",
        "extend",
        "extendleft",
        "insert",
        "pop",
        "popleft",
        "popitem",
        "clear",
        "update",
        "setdefault",
        "add",
        "remove",
        "discard",
        "sort",
        "reverse",
        "rotate",
        "put",
        "get_nowait",
        "fill",
        "write",
        "send",
        "submit",
        "apply_async",
        "item",
        "tolist",
        "numpy",
    ]
)
#: Modules whose functions depend on the world outside.
_WORLDLY = frozenset(
    [
        "os",
        "sys",
        "time",
        "random",
        "datetime",
        "threading",
        "operator",
        "functools",
        "np",
        "numpy",
        "warnings",
    ]
)
#: Never true of what runs in Python.
_SCRIPTING = "torch.jit.is_scripting()"
_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
#: Methods that always give a tensor.
_TENSORS = frozenset(
    ["sigmoid", "softmax", "view", "reshape", "permute", "transpose", "flatten", "unsqueeze"]
)
#: Updates in place that the tracer has nodes for.
_IN_PLACE = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_VIEWS = frozenset(("items", "values", "keys"))
_FORBIDDEN: dict[type[ast.AST], str] = {
    ast.With: "enters a context, which a trace loses",
    ast.AsyncWith: "enters a context, which a trace loses",
    ast.Try: "catches exceptions, those of tracing among them",
    ast.Global: "writes a global",
    ast.Nonlocal: "writes a variable of another function",
    ast.Yield: "is a generator",
    ast.YieldFrom: "is a generator",
    ast.Await: "is asynchronous",
    ast.Match: "branches by match",
    ast.Delete: "deletes something",
    ast.AsyncFunctionDef: "is asynchronous",
}


class _Objection(Exception):
    pass


def reads_training(code: types.CodeType) -> bool:
    """Whether a function, or one inside it, reads an attribute ``training``."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return "training" in code.co_names or any(map(reads_training, inner))


@functools.lru_cache(maxsize=4096)
def objection(code: types.CodeType, known: frozenset[str] = frozenset(["self"])) -> str | None:
    """Why a trace through this function may not stand for every call; None where it may.

    ``known`` are the names of arguments that follow from the module's structure in every call, of
    global enumerations, and of the function itself where its decorators gave it back as it was. That
    it reads the training flag (by ``self.training``) is no objection: a second trace with the flag
    turned shows whether it matters.
    """
    name = getattr(code, "co_qualname", code.co_name)
    try:
        functions = source_of(code)
    except ValueError as error:
        return f"the source of {name} {error}"
    try:
        for function in functions:
            _Auditor(known).visit(function)
    except _Objection as found:
        return f"{name} {found}"
    return None


class _Auditor(ast.NodeVisitor):
    """Follows which names are constant (known from the module's structure) and which are fresh
    (containers made by the function itself), statement by statement. Of names in ``definite`` it is
    constant whether they are None."""

    def __init__(self, known: frozenset[str]) -> None:
        self.known = known
        self.constant: set[str] = set(known)
        self.fresh: set[str] = set()
        self.definite: set[str] = set()

    def visit(self, node: ast.AST) -> None:
        for kind, what in _FORBIDDEN.items():
            if isinstance(node, kind):
                raise _Objection(what)
        super().visit(node)

    # ---- what a name stands for ----

    def is_constant(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.constant
        if isinstance(node, ast.Compare) and _asks_for_none(node):
            return self._is_definite(node.left)
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            function = node.func
            pure = isinstance(function, ast.Name) and function.id in _PURE
            view = isinstance(function, ast.Attribute) and function.attr in _VIEWS
            own = isinstance(function, ast.Name) and function.id in ("getattr", "hasattr")
            if own and _is_self(node.args[0]):
                pure = True
            if not pure and not (view and self.is_constant(function)):
                return ast.unparse(node) == _SCRIPTING
            return all(self.is_constant(argument) for argument in arguments)
        return all(
            self.is_constant(child)
            for child in ast.iter_child_nodes(node)
            if not isinstance(
                child, (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop)
            )
        )

    def _is_definite(self, node: ast.AST) -> bool:
        """Whether the module's structure tells if a value is None."""
        if isinstance(node, ast.IfExp):
            parts = (node.body, node.orelse)
            return self.is_constant(node.test) and all(map(self._is_definite, parts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in _TENSORS and not _is_self(node.func.value)
        if isinstance(node, ast.Name) and node.id in self.definite:
            return True
        return self.is_constant(node)

    def _bind(
        self, target: ast.AST, constant: bool, fresh: bool = False, definite: bool = False
    ) -> None:
        if isinstance(target, ast.Name):
            (self.constant.add if constant else self.constant.discard)(target.id)
            (self.fresh.add if fresh else self.fresh.discard)(target.id)
            (self.definite.add if definite else self.definite.discard)(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._bind(element, constant)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, constant)
        elif self._is_fresh(container := getattr(target, "value", target)):
            self._fill(container, constant)
        else:
            raise _Objection(f"assigns to {ast.unparse(target)!r}")

    def _fill(self, container: ast.AST, constant: bool) -> None:
        """Something is put into a container that the function made."""
        if isinstance(container, ast.Name) and not constant:
            self.constant.discard(container.id)
            self.definite.discard(container.id)

    def _is_fresh(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.fresh

    def _test(self, node: ast.AST) -> None:
        if not self.is_constant(node):
            raise _Objection(f"branches on {ast.unparse(node)!r}, which a trace freezes")
        self.visit(node)

    # ---- statements ----

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in self.known and not all(
            isinstance(d, ast.Name) and d.id in ("staticmethod", "classmethod", "property")
            for d in node.decorator_list
        ):
            raise _Objection("is decorated")
        self._function(node.args, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node.args, [node.body])

    def _function(self, arguments: ast.arguments, body: list) -> None:
        known, self.known = self.known, frozenset()  # of this function, not of those inside it
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        for argument in every:
            self._bind(ast.Name(argument.arg), argument.arg in known)
        for statement in body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        constant, definite = self.is_constant(node.value), self._is_definite(node.value)
        if not isinstance(node.value, ast.Call) and any(map(self._is_fresh, ast.walk(node.value))):
            constant = definite = False  # another name of a container that may be filled later
        for target in node.targets:
            self._bind(target, constant, isinstance(node.value, _CONTAINERS), definite)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if self._is_fresh(node.target):
            return self._fill(node.target, self.is_constant(node.value))
        if isinstance(node.target, ast.Name) and not self._is_list(node.value):
            constant = self.is_constant(node.target)
            if self.is_constant(node.value) if constant else isinstance(node.op, _IN_PLACE):
                return
        raise _Objection(f"updates {ast.unparse(node.target)!r} in place")

    def _is_list(self, node: ast.AST) -> bool:
        return self._is_fresh(node) or isinstance(node, (*_CONTAINERS, ast.Tuple))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, self.is_constant(node.iter))
        for _ in range(2):  # what the end of the body binds holds at its beginning
            for statement in [*node.body, *node.orelse]:
                self.visit(statement)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        self._bind(node.target, self.is_constant(node.iter))
        for test in node.ifs:
            self._test(test)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        for generator in node.generators:
            self.visit(generator)
        self.visit(node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        for generator in node.generators:
            self.visit(generator)
        self.visit(node.key)
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._test(node.test)
        before = self.constant, self.fresh, self.definite
        after = []
        for branch in (node.body, node.orelse):
            self.constant, self.fresh, self.definite = (set(names) for names in before)
            for statement in branch:
                self.visit(statement)
            after.append((self.constant, self.fresh, self.definite))
        self.constant, self.fresh, self.definite = (one & other for one, other in zip(*after))

    def visit_While(self, node: ast.While) -> None:
        raise _Objection("loops while something holds")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._test(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._test(node.test)

    # ---- expressions ----

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self._test(value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._test(node.operand)
        self.visit(node.operand)

    def visit_Compare(self, node: ast.Compare) -> None:
        by_value = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
        if not all(isinstance(op, by_value) for op in node.ops) and not self.is_constant(node):
            raise _Objection(f"asks {ast.unparse(node)!r}, which a trace freezes")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "training" and not _is_self(node.value):
            raise _Objection("reads the training flag of another module, which a trace freezes")
        if ast.unparse(node) == _SCRIPTING.rstrip("()"):
            return
        is_test = node.attr.startswith("is_") or node.attr in ("__dict__", "__class__")
        if is_test or (isinstance(node.value, ast.Name) and node.value.id in _WORLDLY):
            raise _Objection(f"reads {ast.unparse(node)!r}, which a trace freezes")
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value == "training":
            raise _Objection("names the training flag, which a trace freezes")

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if not self.is_constant(node.value):
            raise _Objection(f"writes {ast.unparse(node.value)!r} as text")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        chooses = isinstance(node.value, (ast.List, ast.Tuple, ast.Dict)) or self.is_constant(
            node.value
        )
        index = node.slice
        while isinstance(index, ast.Call) and isinstance(index.func, ast.Attribute):
            if _is_self(index.func.value) or not all(map(self.is_constant, index.args)):
                break
            index = index.func.value  # a view of a buffer
        if chooses and not self.is_constant(index):
            raise _Objection(f"chooses by {ast.unparse(node.slice)!r}")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("_assert", "torch._assert"):
            for argument in call.args[:1]:  # the second is only shown where the first does not hold
                self.visit(argument)
        else:
            self.visit(call)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        constant = all(self.is_constant(argument) for argument in arguments)
        if isinstance(function, ast.Name):
            if function.id in _IMPURE:
                raise _Objection(f"calls {ast.unparse(node)!r}")
            own = function.id not in ("getattr", "hasattr") or _is_self(arguments[0])
            if function.id in _CURIOUS and not (constant and own):
                raise _Objection(f"calls {ast.unparse(node)!r}")
        if isinstance(function, ast.Attribute):
            if function.attr == "apply":
                raise _Objection(
                    f"calls {ast.unparse(function)!r}: a function with a gradient of its own"
                )
            if function.attr in EFFECTS:
                if not self._is_fresh(function.value):
                    raise _Objection(f"calls {ast.unparse(function)!r}, which may have an effect")
                self._fill(function.value, constant)
            if function.attr == "get" and not constant:
                raise _Objection(f"looks up {ast.unparse(node)!r}")
        self.generic_visit(node)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _asks_for_none(node: ast.Compare) -> bool:
    (op, *more), (other, *_) = node.ops, node.comparators
    is_none = isinstance(other, ast.Constant) and other.value is None
    return is_none and isinstance(op, (ast.Is, ast.IsNot)) and not more
