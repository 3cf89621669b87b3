"""Joins multiplies of the same input into one call."""

from __future__ import annotations

import operator
from collections.abc import Hashable

import networkx as nx
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxsparse import ops

from .between import operation
from .calls import can_move, check_rewritten, linear_call, may_write

#: Views; two of one tensor with the same arguments hold the same.
_VIEWS = ("flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view")


class Siblings(PassBase):
    """Multiplies of one x, such as those of queries, keys and values, become one call of
    ``ops.linears`` at the place of the first of them.

    Those with another cap on threads stay apart. Runs after ``Chain`` and ``Epilogue``: what those
    have fused has more to gain.
    """

    def requires(self, graph_module: fx.GraphModule) -> None:
        check_rewritten(graph_module)

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        families = [family for family in _families(graph_module) if len(family) > 1]
        for family in families:
            _join(graph_module.graph, family)
        return PassResult(graph_module, bool(families))


def data_flow(graph: fx.Graph) -> nx.DiGraph:
    """The graph as networkx has it: an edge from each node to each that uses it."""
    return nx.DiGraph([(node, user) for node in graph.nodes for user in node.users])


def _families(graph_module: fx.GraphModule) -> list[list[fx.Node]]:
    """The multiplies, those together that one call can do; each family in the order of the graph."""
    flow = data_flow(graph_module.graph)
    alike: dict[Hashable, list[list[fx.Node]]] = {}
    for node in graph_module.graph.nodes:
        if (call := linear_call(node)) is None:
            continue
        key = (_origin(graph_module, call.x, node), call.in_features, call.dtype, call.threads)
        families = alike.setdefault(key, [])
        if families and _can_join(graph_module, flow, families[-1], node):
            families[-1].append(node)
        else:
            families.append([node])
    return [family for families in alike.values() for family in families]


def _can_join(
    graph_module: fx.GraphModule, flow: nx.DiGraph, family: list[fx.Node], node: fx.Node
) -> bool:
    """Whether ``node`` could be computed where the first of a family is, which stands before it."""
    call = linear_call(node)
    assert call is not None
    constants = [value for value in (call.packed, call.bias) if value is not None]
    if not all(value.op == "get_attr" for value in constants):
        return False
    if any(nx.has_path(flow, member, node) for member in family):
        return False
    return can_move(graph_module, family[0], node)


def _origin(graph_module: fx.GraphModule, x: fx.Node, reader: fx.Node) -> Hashable:
    """What is equal for inputs that hold the same: the node, or how it is viewed."""
    is_view = x.op in ("call_method", "call_function") and operation(x.target) in _VIEWS
    if not is_view or x.kwargs or may_write(graph_module, x):
        return x
    if not can_move(graph_module, x, reader):
        return x
    source, *rest = x.args
    assert isinstance(source, fx.Node)
    return operation(x.target), _origin(graph_module, source, reader), tuple(rest)


def _join(graph: fx.Graph, family: list[fx.Node]) -> None:
    calls = [call for node in family if (call := linear_call(node)) is not None]
    x, *_, in_features, dtype, threads = vars(calls[0]).values()
    for call in calls[1:]:
        for constant in (call.packed, call.bias):
            if constant is not None and family[0] < constant:
                family[0].prepend(constant)
    lists = ([getattr(call, name) for call in calls] for name in ("packed", "bias", "out_features"))
    with graph.inserting_before(family[0]):
        joined = graph.call_function(ops.linears, (x, *lists, in_features, dtype, threads))
        for i, node in enumerate(family):
            part = graph.call_function(operator.getitem, (joined, i))
            node.replace_all_uses_with(part, propagate_meta=False)
    for node in family:
        graph.erase_node(node)
