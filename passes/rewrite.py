"""Turns graph nodes that multiply by a packed weight into calls of the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxsparse import ops
from fxsparse.packing import SUFFIX
from fxsparse.stand_in.weight_view import stand_in

from .normalise import attribute, read
from .record import META, Call, Decision, Weight


def mark(weight: Weight, decision: Decision) -> None:
    """Note on each node that reads an installed weight which call replaces it."""
    nodes = [site.node for site in weight.sites if site.node is not None]
    for node in nodes:
        if META in node.meta:
            shape = decision.shape[::-1] if weight.transposed else decision.shape
            call = Call(shape[0], shape[1], decision.dtype, decision.threads or 0)
            node.meta[META] = replace(node.meta[META], call=call)


class Rewrite(PassBase):
    """Replaces every marked node by a call of the operator; views left without use go.

    Runs after the packed weights are installed.

    ``threads`` has the most threads of each packed weight by its path, which begins with ``prefix``
    for those of the graph module."""

    def __init__(self, prefix: str, threads: Mapping[str, int]) -> None:
        super().__init__()
        self.prefix = prefix
        self.threads = threads

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for node in list(graph_module.graph.nodes):
            multiply = node.meta.get(META)
            if multiply is not None and multiply.call is not None:
                self._replace(graph_module, node, multiply.call)
                modified = True
        for node in list(graph_module.graph.nodes):
            if node.op == "get_attr" and _is_packed(graph_module, str(node.target)):
                most = self.threads.get(f"{self.prefix}{node.target}", 0)
                _stand_in(graph_module.graph, node, most)
                modified = True
        return PassResult(graph_module, modified)

    def _replace(self, graph_module: fx.GraphModule, node: fx.Node, call: Call) -> None:
        graph = graph_module.graph
        operands = read(graph_module, node)
        assert operands is not None
        path, added, bias = operands.multiply.path, operands.added, None
        inputs = list(node.all_input_nodes)
        with graph.inserting_before(node):
            packed = graph.create_node("get_attr", path + SUFFIX)
            if (
                node.op == "call_module"
                and attribute(graph_module, f"{node.target}.bias") is not None
            ):
                bias = graph.create_node("get_attr", f"{node.target}.bias")
            spatial = operands.multiply.spatial
            if spatial or _is_bias(graph_module, added, call):
                bias, added = bias or added, None
            sizes = (call.out_features, call.in_features, call.dtype, call.threads)
            new = graph.call_function(
                ops.conv1x1 if spatial else ops.linear,
                (operands.x, packed, bias, *sizes, *([spatial] if spatial else [])),
            )
            if added is not None:
                new = graph.call_function(torch.add, (new, added))
        node.replace_all_uses_with(new, propagate_meta=False)
        graph.erase_node(node)
        for used in inputs:
            _erase_unused_view(graph, used)


def _is_packed(graph_module: fx.GraphModule, path: str) -> bool:
    """Whether the constant at ``path`` was packed, and stands nowhere or is a stand-in itself."""
    is_dense = type(attribute(graph_module, path)) in (torch.Tensor, torch.nn.Parameter)
    return not is_dense and attribute(graph_module, path + SUFFIX) is not None


def _stand_in(graph: fx.Graph, node: fx.Node, threads: int) -> None:
    """What still uses a packed constant gets its stand-in; where nothing does (of one only the shape
    was read) the node goes."""
    if node.users:
        with graph.inserting_before(node):
            packed = graph.create_node("get_attr", f"{node.target}{SUFFIX}")
            node.replace_all_uses_with(graph.call_function(stand_in, (packed, threads)))
    graph.erase_node(node)


def _is_bias(graph_module: fx.GraphModule, added: object, call: Call) -> bool:
    """Whether what is added is a vector of the module, which the operator takes as its bias."""
    if not isinstance(added, fx.Node) or added.op != "get_attr":
        return False
    vector = attribute(graph_module, str(added.target))
    return tuple(vector.shape) == (call.out_features,) and vector.dtype == call.dtype


def _erase_unused_view(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a constant, or a chain of views of one, that nothing uses any more."""
    if node.users or node.op == "placeholder":
        return
    source = node
    while source.op != "get_attr":
        if len(source.all_input_nodes) != 1 or source.op == "call_module":
            return
        source = source.all_input_nodes[0]
    inputs = list(node.all_input_nodes)
    graph.erase_node(node)
    for used in inputs:
        _erase_unused_view(graph, used)
