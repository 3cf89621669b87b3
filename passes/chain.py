"""Joins the two multiplies of a feed-forward layer into one call."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxsparse import ops
from fxsparse.capture.tracer import imul

from .activations import activation
from .calls import LinearCall, can_move, check_rewritten, is_used_once, linear_call

_aten = torch.ops.aten

#: Products of two tensors of one shape and dtype, where it makes no difference which is written to.
FUNCTIONS = (operator.mul, operator.imul, imul, torch.mul, _aten.mul.Tensor, _aten.mul_.Tensor)
METHODS = ("mul", "mul_", "__mul__")


@dataclass(frozen=True)
class Hidden:
    """What lies between two multiplies: ``activation(up)``, or ``activation(gate) * up``."""

    activation: str
    up: LinearCall
    gate: LinearCall | None
    nodes: list[fx.Node]  #: its own, in the order of the graph


class Chain(PassBase):
    """``linear(act(linear(x)))`` and ``linear(act(linear(x)) * linear(x))`` become one call of
    ``ops.mlp``, whose hidden values stay in the form that the second multiply wants.

    Only where nothing else uses the hidden values, and the caps on threads are the same.
    """

    def requires(self, graph_module: fx.GraphModule) -> None:
        check_rewritten(graph_module)

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for node in list(graph_module.graph.nodes):
            down = linear_call(node)
            hidden = _hidden(graph_module, down.x) if down is not None else None
            if down is None or hidden is None or not _fits(graph_module, hidden, node, down):
                continue
            _replace(graph_module.graph, hidden, node, down)
            modified = True
        return PassResult(graph_module, modified)


def _hidden(graph_module: fx.GraphModule, node: fx.Node) -> Hidden | None:
    """The hidden values that ``node`` has, where it is the last step to them."""
    if not is_used_once(node):
        return None
    factors = _factors(node)
    if factors is None:
        return _activated(graph_module, node)
    for active, other in (factors, factors[::-1]):
        gate, up = _activated(graph_module, active), linear_call(other)
        if gate is None or up is None or not (is_used_once(active) and is_used_once(other)):
            continue
        alike = ("x", "out_features", "in_features", "dtype", "threads")
        if all(getattr(gate.up, name) == getattr(up, name) for name in alike):
            return Hidden(gate.activation, up, gate.up, sorted([*gate.nodes, other, node]))
    return None


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two values that a node multiplies, element by element."""
    spellings = {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op, ())
    if node.target not in spellings or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    return (first, second) if isinstance(first, fx.Node) and isinstance(second, fx.Node) else None


def _activated(graph_module: fx.GraphModule, node: fx.Node) -> Hidden | None:
    """``activation(up)``, as yet without a gate."""
    before = node.args[0] if node.args else None
    up = linear_call(before)
    if up is None or not is_used_once(before):  # type: ignore[arg-type]
        return None
    name = activation(graph_module, node, up.dtype)
    return None if name is None else Hidden(name, up, None, [before, node])  # type: ignore[list-item]


def _fits(graph_module: fx.GraphModule, hidden: Hidden, last: fx.Node, down: LinearCall) -> bool:
    up = hidden.up
    agree = (up.out_features, up.dtype, up.threads) == (down.in_features, down.dtype, down.threads)
    return agree and can_move(graph_module, hidden.nodes[0], last, hidden.nodes)


def _replace(graph: fx.Graph, hidden: Hidden, last: fx.Node, down: LinearCall) -> None:
    up, gate = hidden.up, hidden.gate
    weights = [(call.packed, call.bias) if call else (None, None) for call in (gate, up, down)]
    sizes = (up.in_features, up.out_features, down.out_features, down.dtype, down.threads)
    constants = [constant for pair in weights for constant in pair]
    with graph.inserting_before(last):
        new = graph.call_function(ops.mlp, (up.x, *constants, None, *sizes, hidden.activation))
    last.replace_all_uses_with(new, propagate_meta=False)
    for node in [last, *reversed(hidden.nodes)]:
        graph.erase_node(node)
