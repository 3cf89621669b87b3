"""What an exported graph takes: checked at every call, since the graph stands for nothing else."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

#: What guards may call.
_NAMES: dict[str, Any] = {
    **{"min": min, "max": max, "abs": abs, "int": int, "float": float, "math": math},
    "__builtins__": {},
}


@dataclass(frozen=True)
class Leaf:
    """One member of the inputs: a tensor of this dtype and number of dimensions, or exactly ``value``."""

    path: str
    dtype: torch.dtype | None = None
    dim: int = 0
    value: Any = None

    def problem(self, given: Any) -> str | None:
        """What is wrong with what was given; None where nothing is."""
        if self.dtype is None:
            same = type(given) is type(self.value) and given == self.value
            return None if same else f"expected {self.value!r}, got {_kind(given)}"
        if not isinstance(given, torch.Tensor):
            return f"expected a tensor, got {_kind(given)}"
        if given.dtype != self.dtype or given.dim() != self.dim:
            return f"expected {self.dim}-D {self.dtype}, got {given.dim()}-D {given.dtype}"
        return None


@dataclass(frozen=True)
class ExportedInputs:
    """The structure, members and sizes that an exported graph was proved for.

    ``guards`` are Python expressions over the flat inputs ``args`` that must hold. ``same`` names
    for each input the first one that is the same tensor: ``forward`` may have asked with ``is``.
    ``autocast`` is False where ``forward`` asked whether autocast is on, which it then may not be.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    guards: tuple[str, ...]
    same: tuple[int, ...]
    autocast: bool
    _failing: Callable[..., str | None] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        lines = ["def failing(args):"]
        for guard in self.guards:
            lines.append(f"    if not ({guard}): return {guard!r}")
        namespace = dict(_NAMES)
        exec("\n".join([*lines, "    return None"]), namespace)
        object.__setattr__(self, "_failing", namespace["failing"])

    def __reduce__(self) -> tuple[Any, ...]:  # a compiled function cannot be pickled
        rest = (self.leaves, self.guards, self.same, self.autocast)
        return _rebuild, (spec_data(self.spec), *rest)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The members of a call's inputs, or one ``ValueError`` that says what is wrong with them."""
        try:
            flat = self.spec.flatten_up_to((args, kwargs))
        except ValueError as error:
            raise self._error(f"other inputs came ({error})") from error
        if not all(map(_in_order, self.spec.children(), (args, kwargs))):
            raise self._error("a dict came with its keys in another order")
        for leaf, given in zip(self.leaves, flat):
            if (problem := leaf.problem(given)) is not None:
                raise self._error(f"{leaf.path}: {problem}")
        if _same(flat) != self.same:
            raise self._error("which of the inputs are the same tensor differs (`x is y`)")
        failing = self._failing(flat)
        if failing is not None:
            sizes = {
                leaf.path: tuple(given.shape)
                for leaf, given in zip(self.leaves, flat)
                if leaf.dtype is not None
            }
            raise self._error(f"expected {self._readable(failing)}, got the sizes {sizes}")
        if not self.autocast and torch.is_autocast_enabled("cpu"):
            raise self._error("forward asks whether autocast is on, and it was off")
        return flat

    def _error(self, problem: str) -> ValueError:
        return ValueError(
            f"{problem}. The graph was exported for {self}. Compile with example_inputs like these, "
            "or with capture='modules', which keeps forward as it is"
        )

    def _readable(self, guard: str) -> str:
        for i, leaf in reversed([*enumerate(self.leaves)]):
            guard = guard.replace(f"args[{i}].size()", f"{leaf.path}.shape")
        return guard

    def __str__(self) -> str:
        """The inputs in a line: ``x: 2-D torch.float32, mask=None where x.shape[1] == 64``."""
        parts = [
            f"{leaf.path}={leaf.value!r}"
            if leaf.dtype is None
            else f"{leaf.path}: {leaf.dim}-D {leaf.dtype}"
            for leaf in self.leaves
        ]
        where = " and ".join(map(self._readable, self.guards))
        return ", ".join(parts) + (f" where {where}" if where else "")


def _in_order(spec: pytree.TreeSpec, value: Any) -> bool:
    """Whether every dict has its keys in the order of ``spec``, which forward may see."""
    if spec.type in (dict, OrderedDict):
        inside = value.values()
        if list(value) != list(spec.context):
            return False
    elif spec.type in (list, tuple):
        inside = value
    else:
        return True
    return all(map(_in_order, spec.children(), inside))


def _rebuild(spec: Any, *rest: Any) -> ExportedInputs:
    return ExportedInputs(spec_from(spec), *rest)


def spec_data(spec: pytree.TreeSpec) -> Any:
    """A TreeSpec as plain data: pickling one itself warns."""
    if spec.is_leaf():
        return None
    return spec.type, spec.context, [spec_data(child) for child in spec.children()]


def spec_from(data: Any) -> pytree.TreeSpec:
    """The way back from :func:`spec_data`."""
    if data is None:
        return pytree.tree_structure(0)
    type_, context, children = data
    return pytree.TreeSpec(type_, context, [spec_from(child) for child in children])


def exported_inputs(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    program: torch.export.ExportedProgram,
    autocast: bool,
) -> ExportedInputs:
    """What ``program``, exported from ``forward`` with these inputs, takes.

    Raises a ``ValueError`` for an assumption of export that cannot be checked.
    """
    flat, spec = pytree.tree_flatten((args, kwargs))
    paths = _paths(forward, args, kwargs)
    leaves = tuple(_leaf(path, value) for path, value in zip(paths, flat))
    inputs = program.graph_signature.user_inputs
    metas = {n.name: n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")}
    values = [metas[name] if isinstance(name, str) else None for name in inputs]
    guards = [*_size_guards(values, program), *_code_guards(program, paths)]
    return ExportedInputs(spec, leaves, tuple(dict.fromkeys(guards)), _same(flat), autocast)


def _leaf(path: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        return Leaf(path, value.dtype, value.dim())
    return Leaf(path, value=value)


def _paths(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Each input as forward names it: ``x``, ``batch['ids']``, ``rest[0]`` of ``*rest``."""
    positional: list[str] = []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            extra = range(len(args) - len(positional))
            positional += [f"{parameter.name}[{i}]" for i in extra]
        positional.append(parameter.name)
    paths = []
    for key, _ in pytree.tree_flatten_with_path((args, kwargs))[0]:
        name = positional[key[1].idx] if key[0].idx == 0 else key[1].key  # type: ignore[attr-defined]
        paths.append(name + pytree.keystr(key[2:]))
    return paths


def _size_guards(values: Sequence[Any], program: torch.export.ExportedProgram) -> list[str]:
    """Sizes that are fixed, equal to others, computed from others, or within bounds."""
    guards: list[str] = []
    sources: dict[Any, str] = {}
    sizes = [
        (f"args[{i}].size()[{j}]", size)
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor)
        for j, size in enumerate(value.shape)
    ]
    computed: list[tuple[str, Any]] = []
    for source, size in sizes:
        if isinstance(size, int):
            guards.append(f"{source} == {size}")
            continue
        expression = size.node.expr
        if expression in sources:
            guards.append(f"{source} == {sources[expression]}")
        elif expression.is_symbol:
            sources[expression] = source
        else:
            computed.append((source, expression))
    for symbol, source in sources.items():
        bounds = program.range_constraints.get(symbol)
        if bounds is not None and bounds.lower > 0:
            guards.append(f"{source} >= {bounds.lower}")
        if bounds is not None and isinstance(bounds.upper, sympy.Integer):
            guards.append(f"{source} <= {bounds.upper}")
    for source, expression in computed:
        text = PythonPrinter().doprint(expression)
        for symbol in expression.free_symbols:
            if symbol not in sources:
                raise ValueError(f"a size follows from another that is no input's: {expression}")
            text = text.replace(str(symbol), sources[symbol])
        guards.append(f"{source} == {text}")
    return guards


def _code_guards(program: torch.export.ExportedProgram, paths: list[str]) -> list[str]:
    """What export observed of sizes on the way, in terms of the flat inputs."""
    guards = []
    for guard in program._guards_code:
        for i, path in enumerate(paths):
            name, bracket, rest = path.partition("[")
            guard = guard.replace(f"L[{name!r}]{bracket}{rest}.", f"args[{i}].")
        if "L[" in guard:
            raise ValueError(f"export assumes what cannot be checked: {guard}")
        guards.append(guard)
    return guards


def _same(flat: Sequence[Any]) -> tuple[int, ...]:
    """For each tensor the place of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(value), i) if isinstance(value, torch.Tensor) else i
        for i, value in enumerate(flat)
    )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}"
    simple = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if simple else f"a {type(value).__name__}"
