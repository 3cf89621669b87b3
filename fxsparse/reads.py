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
_LEFT = {"matmul": (0, "input"), "mm": (0, "input"), "bmm": (0, "input"), "mv": (0, "input")}
#: Functions that look rows up.
LOOK_UPS = frozenset(["embedding"])

#: What may be asked of a weight without its values.
_FACTS = frozenset(
    ["dtype", "device", "shape", "ndim", "layout", "is_cuda", "requires_grad", "itemsize"]
)
_FACT_METHODS = frozenset(["size", "dim", "numel", "is_floating_point", "stride", "get_device"])
#: Methods that keep the matrix, and those that transpose it.
_SAME = frozenset(
    ["to", "type", "type_as", "contiguous", "detach", "float", "squeeze", "unsqueeze"]
)
_SWAPS = frozenset(["t", "transpose", "permute", "swapaxes", "T", "mT"])

#: Methods that build a module or describe it, not run it.
_NOT_RUN = frozenset(["__init__", "reset_parameters", "extra_repr", "__repr__", "init_weights"])


class Unknown(Exception):
    """A use of a weight that is not understood; its text is that code."""


@dataclass
class Reads:
    """How a weight is used: ``swapped`` has, for each multiply, whether it is ``x @ W``; ``cuts`` what
    is given as first size where it is viewed in another shape."""

    swapped: list[bool] = field(default_factory=list)
    looked_up: bool = False
    calls_super: bool = False  #: ``super().forward`` runs, which may use it too
    cuts: list[ast.expr] = field(default_factory=list)

    def blocks(self, module: object) -> int:
        """Into how many parts the views cut the rows of a matrix that ``module`` holds; 0: not."""
        for cut in self.cuts:
            value = getattr(cut, "value", None)
            if isinstance(cut, ast.Attribute) and _is_self(cut.value):
                value = getattr(module, cut.attr, None)
            if isinstance(value, int) and value > 1:
                return value
        return 0


def how_read(cls: type, name: str) -> Reads | str:
    """How the methods of ``cls`` use ``self.name``; text where some use of it is not understood."""
    found = Reads()
    try:
        for code in _codes(cls):
            for function in _parsed(code):
                _Finder(function).find(name, found)
    except Unknown as unknown:
        return f"{cls.__name__} uses it in {str(unknown)!r}, which is not a multiply that is understood"
    except ValueError as error:
        return f"the source of {cls.__name__} {error}"
    return found


def _codes(cls: type) -> Iterator[types.CodeType]:
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
        self.parents = {
            id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)
        }

    def find(self, name: str, found: Reads) -> None:
        for node in ast.walk(self.function):
            if isinstance(node, ast.Attribute) and node.attr == name and _is_self(node.value):
                if not isinstance(node.ctx, ast.Load):
                    raise Unknown(ast.unparse(self.parents[id(node)]))
                self._follow(node, False, found, set())
            elif _is_super_forward(node):
                found.calls_super = True
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "setattr", "vars")
                and node.args
                and _is_self(node.args[0])
                and not (
                    len(node.args) > 1
                    and isinstance(node.args[1], ast.Constant)
                    and node.args[1].value != name
                )
            ):
                raise Unknown(ast.unparse(node))

    def _follow(self, node: ast.AST, swapped: bool, found: Reads, seen: set[str]) -> None:
        """What becomes of ``node``, which is the weight, or its transpose where ``swapped``."""
        parent = self.parents.get(id(node))
        if isinstance(parent, ast.Attribute):
            return self._attribute(parent, swapped, found, seen)
        if isinstance(parent, ast.Subscript) and parent.value is node:
            return self._follow(parent, swapped, found, seen)  # an expert of several
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult):
            found.swapped.append(not swapped if parent.right is node else swapped)
            return None
        if isinstance(parent, ast.Compare) and all(
            isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops
        ):
            return None
        if isinstance(parent, ast.IfExp) and parent.test is not node:
            return self._follow(parent, swapped, found, seen)
        if isinstance(parent, (ast.Call, ast.keyword)):
            return self._argument(node, parent, swapped, found)
        if isinstance(parent, (ast.Assign, ast.NamedExpr)) and parent.value is node:
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            for target in targets:
                if not isinstance(target, ast.Name):
                    raise Unknown(ast.unparse(parent))
                self._local(target.id, swapped, found, seen)
            return None
        raise Unknown(ast.unparse(parent or node))

    def _local(self, name: str, swapped: bool, found: Reads, seen: set[str]) -> None:
        if name in seen:
            return
        for node in ast.walk(self.function):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                self._follow(node, swapped, found, seen | {name})

    def _attribute(self, node: ast.Attribute, swapped: bool, found: Reads, seen: set[str]) -> None:
        call = self.parents.get(id(node))
        is_call = isinstance(call, ast.Call) and call.func is node
        if node.attr in _FACTS or (is_call and node.attr in _FACT_METHODS):
            return
        after = call if is_call else node
        assert after is not None
        if node.attr in _SAME and is_call:
            self._follow(after, swapped, found, seen)
        elif node.attr in _SWAPS:
            self._follow(after, not swapped, found, seen)
        elif node.attr in ("view", "reshape") and isinstance(call, ast.Call) and call.args:
            found.cuts.append(call.args[0])
            self._follow(call, swapped, found, seen)
        elif node.attr in _LEFT and is_call:
            found.swapped.append(swapped)
        else:
            raise Unknown(ast.unparse(after))

    def _argument(
        self, node: ast.AST, parent: ast.Call | ast.keyword, swapped: bool, found: Reads
    ) -> None:
        call = self.parents[id(parent)] if isinstance(parent, ast.keyword) else parent
        assert isinstance(call, ast.Call)
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        is_method = isinstance(function, ast.Attribute) and not _is_module(function.value)
        place: int | str | None = parent.arg if isinstance(parent, ast.keyword) else None
        if place is None:
            place = next(i for i, a in enumerate(call.args) if a is node) + is_method
        first = call.args[0] if call.args else None
        equation = first.value if isinstance(first, ast.Constant) else None
        use = multiply_use(name, place, swapped, equation)
        if use is not None:
            found.swapped.append(use)
        elif name in LOOK_UPS and place in (1, "weight"):
            found.looked_up = True
        elif name not in ("isinstance", "hasattr", "len"):
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


def _is_super_forward(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "forward"
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    )


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_module(node: ast.AST) -> bool:
    """Whether a name stands for a module of Python (``F.linear``), not for a tensor."""
    return ast.unparse(node) in (
        "torch",
        "F",
        "nn.functional",
        "torch.nn.functional",
        "torch._C._nn",
    )
