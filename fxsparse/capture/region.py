"""Regions of an exported graph that run in another mode of torch: autocast, gradients off.

``torch.export`` writes them as higher-order operators, which a graph loses when fx traces it anew
(on unpickling). Here they become modules, or part of the graph around them where that is the same.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from .exported_module import OperatorGraphModule

_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


class Region(torch.nn.Module):
    """Runs ``body`` under autocast with the arguments ``autocast``, or with gradients on or off."""

    def __init__(
        self,
        body: fx.GraphModule,
        grad: bool | None = None,
        autocast: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__()
        self.body = OperatorGraphModule(body, body.graph)
        self.grad, self.autocast = grad, autocast

    def forward(self, *args: Any) -> Any:
        with self._mode():
            return self.body(*args)

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            assert self.grad is not None
            return torch.set_grad_enabled(self.grad)
        device, dtype, enabled, cache = self.autocast
        return torch.autocast(device, dtype, enabled, cache)


def open_regions(graph_module: fx.GraphModule) -> None:
    """Make every region of a graph a :class:`Region`, or nodes of the graph itself.

    Raises a ``ValueError`` for any other higher-order operator.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        if node.target is _AUTOCAST:
            count = 4
        elif node.target is _SET_GRAD:
            count = 1
        else:
            raise ValueError(f"the operator {node.target} cannot be kept in the graph")
        arguments: list[Any] = [*node.args]
        mode, body, operands = arguments[:count], arguments[count], tuple(arguments[count + 1 :])
        path = str(body.target)
        inner = graph_module.get_submodule(path)
        assert isinstance(inner, fx.GraphModule)
        open_regions(inner)
        if mode == [False] and _is_functional(inner):
            _inline(graph, node, inner, operands)
            continue
        region = Region(inner, *mode) if count == 1 else Region(inner, autocast=tuple(mode))
        graph_module.set_submodule(path, region)
        with graph.inserting_before(node):
            new = graph.call_module(path, operands)
        new.meta = node.meta
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)


def _is_functional(body: fx.GraphModule) -> bool:
    """Whether a graph calls operators only, none of which writes to its arguments."""
    return all(
        node.op in ("placeholder", "output", "get_attr")
        or (
            node.op == "call_function"
            and not (
                isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
            )
        )
        for node in body.graph.nodes
    )


def _inline(graph: fx.Graph, node: fx.Node, body: fx.GraphModule, operands: tuple) -> None:
    """Put a region without gradients into the graph around it: what it makes is detached."""
    inputs: list[fx.Node] = [*body.graph.find_nodes(op="placeholder")]
    values: dict[fx.Node, Any] = dict(zip(inputs, operands))
    returned: Any = body.graph.output_node().args[0]
    with graph.inserting_before(node):
        made: Any = graph.graph_copy(body.graph, values)
        outputs = []
        for inner, output in zip(returned, made):
            if isinstance(inner, fx.Node) and inner not in inputs and _is_tensor(inner):
                meta, output = (
                    output.meta,
                    graph.call_function(torch.ops.aten.detach.default, (output,)),
                )
                output.meta = dict(meta)
            outputs.append(output)
    for user in list(node.users):  # each takes one of the outputs
        place: Any = user.args[1]
        user.replace_all_uses_with(outputs[place])
        graph.erase_node(user)
    graph.erase_node(node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
