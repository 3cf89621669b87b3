"""Reads in the source of a class how its methods use a weight that it holds.

A forward that was not traced may do anything with a parameter. Packing one that is multiplied by
saves memory and time; packing one that is added, normalised or written to would rebuild the dense
weight at every call. :func:`how_read` tells them apart. A wrong guess costs time, never the result:
the stand-in of a packed weight does everything that a tensor does.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .source import source_of

#: Functions and methods that multiply by their n-th argument: (index, name, it is multiplied as it is).
#: ``linear`` multiplies by the transpose of what it is given, ``matmul`` by the matrix itself.
_MULTIPLIES: dict[str, tuple[int, str, bool]] = {
    "linear": (1, "weight", False),
    "matmul": (1, "other", True),
    "mm": (1, "mat2", True),
    "bmm": (1, "mat2", True),
    "addmm": (2, "mat2", True),
    "baddbmm": (2, "batch2", True),
    "grouped_mm": (1, "mat_b", True),
    "_grouped_mm": (1, "mat_b", True),
    "inner": (1, "other", False),
    "tensordot": (1, "b", True),
}
#: Functions that multiply from the left: (index of the matrix, name).
_LEFT = {
    **dict.fromkeys(["matmul", "mm", "bmm", "mv"], (0, "input")),
    # transformers' name for the attention that was chosen: (module, query, key, value, ...).
    "attention_interface": (1, "query"),
}
#: Functions that look rows up.
LOOK_UPS = frozenset(["embedding"])

_ITERATES = frozenset(["enumerate", "zip", "reversed"])

#: What may be asked of a weight without its values.
FACTS = frozenset(
    ["dtype", "device", "shape", "ndim", "layout", "is_cuda", "requires_grad", "itemsize"]
)
FACT_METHODS = frozenset(["size", "dim", "numel", "is_floating_point", "stride", "get_device"])
#: Methods that keep the matrix or choose of several, those that transpose it, and those that cut it.
_SAME = frozenset(
    [
        "to",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "detach",
        "data",
        "float",
        "half",
        "bfloat16",
        "squeeze",
        "unsqueeze",
        "expand",
        "unbind",
        "index_select",
        "select",
    ]
)
_SWAPS = frozenset(["t", "transpose", "permute", "swapaxes", "T", "mT"])
_CUTS = frozenset(["narrow", "split", "chunk"])

#: Methods that build a module or describe it, not run it.
_NOT_RUN = frozenset(["__init__", "reset_parameters", "extra_repr", "__repr__", "init_weights"])


class Unknown(Exception):
    """A use of a weight that is not understood; its text is that code."""


@dataclass
class Reads:
    """How a weight is used: ``swapped`` has, for each multiply, whether it is ``x @ W``; ``cuts`` what
    is given as first size where it is viewed in another shape, a number or the name of an attribute;
    ``sliced``: a part of it is taken."""

    swapped: list[bool] = field(default_factory=list)
    looked_up: bool = False
    calls_super: bool = False  #: ``super().forward`` runs, which may use it too
    cuts: list[int | str] = field(default_factory=list)
    sliced: bool = False

    def blocks(self, module: object) -> int:
        """Into how many parts the views cut the rows of a matrix that ``module`` holds; 0: not."""
        for cut in self.cuts:
            value = getattr(module, cut, None) if isinstance(cut, str) else cut
            if isinstance(value, int) and value > 1:
                return value
        return 0


def how_read(cls: type, name: str) -> Reads | str:
    """How the methods of ``cls`` use ``self.name``; text where some use of it is not understood."""
    found = Reads()
    try:
        for code in codes_of(cls):
            for function in _parsed(code):
                _Finder(function).find(name, found)
    except Unknown as unknown:
        return f"{cls.__name__} uses it in {str(unknown)!r}, which is not a multiply that is understood"
    except ValueError as error:
        return f"the source of {cls.__name__} {error}"
    return found


def codes_of(cls: type) -> Iterator[types.CodeType]:
    """The code of every method that may run with ``forward``, of the class and its own bases."""
    taken = set(_NOT_RUN)
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, value in vars(base).items():
            if name in taken:
                continue
            taken.add(name)
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            function = inspect.unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if code is not None and not (code.co_filename.startswith("<") and name != "forward"):
                yield code


@functools.lru_cache(maxsize=1024)
def _parsed(code: types.CodeType) -> tuple[ast.AST, ...]:
    return tuple(source_of(code))


class _Finder:
    """Follows one function's uses of an attribute of ``self`` up through the expressions around it."""

    def __init__(self, function: ast.AST) -> None:
        self.function = function
        self.self_name = self_name(function)
        self.parents = {
            id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)
        }
        self.names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        self.seen: set[tuple[int, bool]] = set()

    def find(self, name: str, found: Reads) -> None:
        for node in ast.walk(self.function):
            if isinstance(node, ast.Attribute) and node.attr == name and self._is_self(node.value):
                self._follow(_loaded(node), False, found)
            elif _is_super_forward(node):
                found.calls_super = True
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "setattr", "vars")
                and node.args
                and self._is_self(node.args[0])
            ):
                asked = node.args[1] if len(node.args) > 1 else None
                which = asked.value if isinstance(asked, ast.Constant) else None
                if which is None or (which == name and node.func.id != "getattr"):
                    raise Unknown(ast.unparse(node))
                if which == name:
                    self._follow(node, False, found)

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.self_name

    def _follow(self, node: ast.expr, swapped: bool, found: Reads) -> None:
        """What becomes of ``node``, which is the weight, or its transpose where ``swapped``."""
        parent = self.parents.get(id(node))
        if isinstance(parent, ast.Attribute):
            self._attribute(parent, swapped, found)
        elif isinstance(parent, ast.Subscript) and parent.value is node:
            found.sliced = found.sliced or _is_part(parent.slice)
            self._follow(_loaded(parent), swapped, found)  # an expert of several
        elif isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult):
            found.swapped.append(not swapped if parent.right is node else swapped)
        elif isinstance(parent, ast.Compare) and all(
            isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops
        ):
            return
        elif isinstance(parent, ast.IfExp) and parent.test is not node:
            self._follow(parent, swapped, found)
        elif isinstance(parent, (ast.Call, ast.keyword)):
            self._argument(node, parent, swapped, found)
        else:
            self._bind(node, parent, swapped, found)

    def _bind(self, node: ast.expr, parent: ast.AST | None, swapped: bool, found: Reads) -> None:
        """Follow the local names that a node is given, or each of its elements."""
        at: list[int] = []  # where in nested targets the name is
        if isinstance(parent, ast.Tuple):  # ``a, b = self.a, self.b``
            at, parent = [_index(parent.elts, node)], self.parents[id(parent)]
        while isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in _ITERATES:
            function = ast.unparse(parent.func)
            at = {"enumerate": [1], "zip": [_index(parent.args, node)]}.get(function, []) + at
            node, parent = parent, self.parents[id(parent)]
        targets: list[ast.expr] = []
        if isinstance(parent, ast.Assign):
            targets = parent.targets
        elif isinstance(parent, (ast.AnnAssign, ast.NamedExpr)) or (
            isinstance(parent, (ast.For, ast.comprehension)) and parent.target is not node
        ):
            targets = [parent.target]
        for i in at:
            targets = [
                target.elts[i] if isinstance(target, ast.Tuple) and i < len(target.elts) else target
                for target in targets
            ]
        names = [target for target in targets if isinstance(target, ast.Name)]
        if not names or len(names) < len(targets):
            raise Unknown(ast.unparse(parent or node))
        for name in names:
            self._local(name, swapped, found)
        if isinstance(parent, ast.NamedExpr):
            self._follow(parent, swapped, found)

    def _local(self, target: ast.Name, swapped: bool, found: Reads) -> None:
        """Follow every use of a local name until it is bound again."""
        if (id(target), swapped) in self.seen:  # ``for w in w``
            return
        self.seen.add((id(target), swapped))
        for name in self.names:
            if name.id != target.id or name is target:
                continue
            parent = self.parents[id(name)]
            is_written = isinstance(parent, ast.AugAssign) and parent.target is name
            if (isinstance(name.ctx, ast.Load) or is_written) and self._reaches(target, name):
                if is_written:
                    raise Unknown(ast.unparse(parent))
                self._follow(name, swapped, found)

    def _reaches(self, target: ast.Name, use: ast.Name) -> bool:
        """Whether a use of a name may be of what was bound to it at ``target``."""
        comprehension = self._around(target, ast.comprehension)
        if comprehension is not None:
            inside = self.parents[id(comprehension)]
            return self._is_within(use, inside)
        statement = self._around(target, ast.stmt)
        if _position(use) < _position(target) or (
            isinstance(statement, (ast.Assign, ast.AnnAssign))
            and self._is_within(use, statement)
            and not isinstance(self.parents[id(target)], ast.NamedExpr)
        ):
            return False
        return not any(
            name.id == target.id
            and isinstance(name.ctx, ast.Store)
            and _position(target) < _position(name) < _position(use)
            and self._follows(use, self._around(name, ast.stmt))
            for name in self.names
        )

    def _around(self, node: ast.AST, kind: type[ast.AST]) -> ast.AST | None:
        """The innermost node of a kind around another, within one statement."""
        while not isinstance(node, kind):
            if isinstance(node, ast.stmt) or id(node) not in self.parents:
                return None
            node = self.parents[id(node)]
        return node

    def _is_within(self, node: ast.AST, outer: ast.AST) -> bool:
        while node is not outer:
            if id(node) not in self.parents:
                return False
            node = self.parents[id(node)]
        return True

    def _follows(self, node: ast.AST, statement: ast.AST | None) -> bool:
        """Whether a node comes after a statement of the same block, or of one around it."""
        if statement is None:
            return False
        parent = self.parents[id(statement)]
        blocks = [block for _, block in ast.iter_fields(parent) if isinstance(block, list)]
        for block in blocks:
            if any(s is statement for s in block):
                after = block[_index(block, statement) + 1 :]
                return any(self._is_within(node, s) for s in after)
        return False

    def _attribute(self, node: ast.Attribute, swapped: bool, found: Reads) -> None:
        call = self.parents.get(id(_loaded(node)))
        is_call = isinstance(call, ast.Call) and call.func is node
        if node.attr in FACTS or (is_call and node.attr in FACT_METHODS):
            return
        after = call if isinstance(call, ast.Call) and is_call else node
        if node.attr in _SAME:
            self._follow(after, swapped, found)
        elif node.attr in _SWAPS:
            self._follow(after, not swapped, found)
        elif node.attr in _CUTS and is_call:
            found.sliced = True
            self._follow(after, swapped, found)
        elif node.attr in ("view", "reshape") and isinstance(call, ast.Call) and call.args:
            self._cut(call.args[0], found)
            self._follow(call, swapped, found)
        elif node.attr in _LEFT and is_call:
            found.swapped.append(swapped)
        else:
            raise Unknown(ast.unparse(after))

    def _cut(self, size: ast.expr, found: Reads) -> None:
        if isinstance(size, ast.Constant) and isinstance(size.value, int):
            found.cuts.append(size.value)
        elif isinstance(size, ast.Attribute) and self._is_self(size.value):
            found.cuts.append(size.attr)

    def _argument(
        self, node: ast.expr, parent: ast.Call | ast.keyword, swapped: bool, found: Reads
    ) -> None:
        call = self.parents[id(parent)] if isinstance(parent, ast.keyword) else parent
        assert isinstance(call, ast.Call)
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        is_method = isinstance(function, ast.Attribute) and not _is_module(function.value)
        place: int | str | None = parent.arg if isinstance(parent, ast.keyword) else None
        if place is None:
            place = _index(call.args, node) + is_method
        first = call.args[0] if call.args else None
        equation = first.value if isinstance(first, ast.Constant) else None
        use = multiply_use(name, place, swapped, equation)
        if use is not None:
            found.swapped.append(use)
        elif name in LOOK_UPS and place in (1, "weight"):
            found.looked_up = True
        elif name in _ITERATES and isinstance(place, int):
            self._bind(node, call, swapped, found)
        elif name not in ("isinstance", "hasattr", "len", "range"):
            raise Unknown(ast.unparse(call))


def multiply_use(
    name: str, place: int | str | None, swapped: bool, equation: object = None
) -> bool | None:
    """Whether a function multiplies ``x @ W`` (or by W transposed) with its argument at ``place``, which
    is W, or its transpose where ``swapped``; None where it is no multiply by that argument."""
    if name in _MULTIPLIES and place in _MULTIPLIES[name][:2]:
        return swapped != _MULTIPLIES[name][2]
    if name in _LEFT and place in _LEFT[name]:
        return swapped
    if name == "einsum" and isinstance(place, int) and isinstance(equation, str):
        return swapped != _einsum_swaps(equation, place - 1)
    return None


def _einsum_swaps(equation: str, operand: int) -> bool:
    """Whether the last dimension of an operand is one of the result's: then it is ``x @ W``."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not output or operand >= len(terms) or not terms[operand][-1:].isalpha():
        raise Unknown(f"einsum({equation!r})")
    return terms[operand][-1] in output


def self_name(function: ast.AST) -> str:
    """What a method calls the module."""
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return "self"
    is_static = any(
        ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list
    )
    return "self" if is_static else function.args.args[0].arg


def _loaded(node: ast.Attribute | ast.Subscript) -> ast.Attribute | ast.Subscript:
    """A node that is read, not written to."""
    if not isinstance(node.ctx, ast.Load):
        raise Unknown(ast.unparse(node))
    return node


def _is_part(index: ast.expr) -> bool:
    """Whether an index takes a slice that is not the whole."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(p, ast.Slice) and (p.lower or p.upper or p.step) for p in parts)


def _index(nodes: list[Any], node: ast.AST) -> int:
    return next(i for i, other in enumerate(nodes) if other is node)


def _position(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _is_module(node: ast.AST) -> bool:
    """Whether a name stands for a module of Python (``F.linear``), not for a tensor."""
    return ast.unparse(node) in (
        "torch",
        "F",
        "functional",
        "nn.functional",
        "torch.nn.functional",
        "torch._C._nn",
    )


def _is_super_forward(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "forward"
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )
