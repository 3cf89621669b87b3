"""Turns fused calls back into the sequences that they stand for."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxsparse import ops
from fxsparse.epilogues import ACTIVATIONS
from fxsparse.fused import linear_with, mlp_with

_COMBINE = {"add": operator.add, "mul": operator.mul}


class Unfuse(PassBase):
    """Leaves calls of ``ops.linear`` and functions of torch: undoes Chain, Epilogue and Siblings."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        graph, modified = graph_module.graph, False
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _UNDO:
                continue
            with graph.inserting_before(node):
                _UNDO[node.target](graph, node)
            graph.erase_node(node)
            modified = True
        return PassResult(graph_module, modified)


def _linear_fused(graph: fx.Graph, node: fx.Node) -> None:
    x, packed, bias, other, out_features, in_features, dtype, threads, epilogue = node.args[:9]
    y = _linear(graph, x, packed, bias, out_features, in_features, dtype, threads)
    for step in str(epilogue).split():
        y = _join(graph, node, step, y, other) if step in _COMBINE else _act(y, step)
    node.replace_all_uses_with(y)


def _mlp(graph: fx.Graph, node: fx.Node) -> None:
    x, gate, gate_bias, up, up_bias, down, down_bias, residual = node.args[:8]
    in_features, hidden, out_features, dtype, threads, activation = node.args[8:14]
    sizes = (hidden, in_features, dtype, threads)
    h = _linear(graph, x, up, up_bias, *sizes)
    if gate is None:
        h = _act(h, str(activation))
    else:
        active = _act(_linear(graph, x, gate, gate_bias, *sizes), str(activation))
        h = graph.call_function(operator.mul, (active, h))
    y = _linear(graph, h, down, down_bias, out_features, hidden, dtype, threads)
    if residual is not None:
        y = _join(graph, node, "add", y, residual)
    node.replace_all_uses_with(y)


def _linears(graph: fx.Graph, node: fx.Node) -> None:
    x, *lists, in_features, dtype, threads = node.args[:7]
    parts = [_linear(graph, x, p, b, n, in_features, dtype, threads) for p, b, n in zip(*lists)]
    for part in list(node.users):  # operator.getitem
        part.replace_all_uses_with(parts[part.args[1]])  # type: ignore[index]
        graph.erase_node(part)


def _linear(graph: fx.Graph, *args: Any) -> fx.Node:
    return graph.call_function(ops.linear, args)


def _join(graph: fx.Graph, node: fx.Node, step: str, y: fx.Node, other: Any) -> fx.Node:
    both = (other, y) if node.kwargs.get("other_first") else (y, other)
    return graph.call_function(_COMBINE[step], both)


def _act(y: fx.Node, activation: str) -> fx.Node:
    proxy = fx.Proxy(y, fx.proxy.GraphAppendingTracer(y.graph))
    return ACTIVATIONS[activation].reference(proxy).node  # type: ignore[arg-type, attr-defined]


_UNDO = {
    ops.linear_fused: _linear_fused,
    linear_with: _linear_fused,
    ops.mlp: _mlp,
    mlp_with: _mlp,
    ops.linears: _linears,
}
