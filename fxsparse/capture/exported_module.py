"""The GraphModules that ``torch.export`` leads to.

``fx`` pickles the code of a graph and traces that anew, which would run whatever depends on no input:
random numbers and buffers would become constants. These are pickled node by node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.fx.graph_module import _CodeOnlyModule
from torch.fx.node import map_aggregate

from .exported_inputs import ExportedInputs, spec_data, spec_from
from .graph_module import SparseGraphModule, Transient, restore, transient_buffers


class OperatorGraphModule(SparseGraphModule):
    """A GraphModule whose graph is pickled node by node."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__base__, *self._parts())

    def _parts(self) -> tuple[Any, ...]:
        body = {key: value for key, value in self.__dict__.items() if key not in _MADE_ANEW}
        nodes = [_data(node) for node in self.graph.nodes]
        return type(self).__name__, body, nodes, transient_buffers(self)


class ExportedGraphModule(OperatorGraphModule):
    """An exported model: it takes the inputs and stays in the modes that it was exported for."""

    _inputs: ExportedInputs

    def train(self, mode: bool = True) -> ExportedGraphModule:
        """Does nothing in the mode that was exported; another one is a ``RuntimeError``."""
        if any(module.training is not mode for module in self.modules()):
            wanted = "train()" if mode else "eval()"
            raise RuntimeError(
                f"an exported graph keeps the training flags of its export: call {wanted} on the "
                "model before compile, or use capture='modules'"
            )
        return self

    def hold(self, inputs: ExportedInputs, names: list[str], out_spec: Any) -> None:
        """Take and return the model's containers; ``names`` are forward's arguments."""
        self._inputs = inputs
        self.graph.set_codegen(_CheckedCodeGen(_PyTreeInfo(names, inputs.spec, out_spec)))
        self.recompile()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedGraphModule:
        info = self.graph._codegen.pytree_info  # type: ignore[attr-defined]
        memo.update((id(fixed), fixed) for fixed in (self._inputs, info.in_spec, info.out_spec))
        result: Any = super().__deepcopy__(memo)
        result._inputs = self._inputs
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        info = self.graph._codegen.pytree_info  # type: ignore[attr-defined]
        return _rebuild_exported, (info.orig_args, spec_data(info.out_spec), *self._parts())


#: What a GraphModule holds of its graph and its code.
_MADE_ANEW = ("_graph", "_code", "_lineno_map", "_prologue_start", "_in_spec", "_out_spec")


class _CheckedCodeGen(_PyTreeCodeGen):
    """Flattens inputs by :class:`ExportedInputs`, which checks them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _CheckedCodeGen:
        return _CheckedCodeGen(self.pytree_info)  # copying a TreeSpec warns

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], *_: Any) -> str:
        args, kwargs = self.pytree_info.in_spec.children()
        names = self.pytree_info.orig_args
        positional = "".join(f"{name}, " for name in names[: args.num_children])
        keywords = zip(kwargs.context, names[args.num_children :])
        given = ", ".join(f"{key!r}: {name}" for key, name in keywords)
        flat = "".join(f"{name.split(':')[0]}, " for name in free_vars)
        return f"\n    {flat} = self._inputs.flatten(({positional}), {{{given}}})"


class _Reference(str):
    """The name of the node that stands in its place."""


def _data(node: fx.Node) -> tuple[Any, ...]:
    """A node as plain data. Operators go by their names: they cannot be pickled."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = (target.namespace, target._opname, target._overloadname)
    arguments = map_aggregate((node.args, node.kwargs), _to_reference)
    return node.op, node.name, target, arguments


def _to_reference(value: Any) -> Any:
    return _Reference(value.name) if isinstance(value, fx.Node) else value


def _rebuild(
    cls: type[OperatorGraphModule],
    name: str,
    body: dict[str, Any],
    nodes: list[tuple[Any, ...]],
    transient: Transient,
) -> Any:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}

    def to_node(value: Any) -> Any:
        return made[value] if isinstance(value, _Reference) else value

    for op, own_name, target, arguments in nodes:
        if isinstance(target, tuple):
            namespace, operator, overload = target
            target = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        args, kwargs = map_aggregate(arguments, to_node)
        made[own_name] = graph.create_node(op, target, args, kwargs, name=own_name)
    result: Any = cls(_CodeOnlyModule(body), graph, name)
    for key, value in body.items():
        if not hasattr(result, key):
            setattr(result, key, value)
    restore(result, transient)
    return result


def _rebuild_exported(names: list[str], out_spec: Any, *parts: Any) -> ExportedGraphModule:
    result = _rebuild(ExportedGraphModule, *parts)
    result.hold(result._inputs, names, spec_from(out_spec))
    return result
