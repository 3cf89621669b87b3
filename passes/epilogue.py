"""Moves what follows a multiply into its call: an activation, a residual, a gate."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxsparse import ops
from fxsparse.fused import linear_with, mlp_with, order

from .activations import activation
from .calls import can_move, check_rewritten, is_used_once, linear_call

_aten = torch.ops.aten

#: Sums and products. Those in place are not among them: they keep the shape and dtype of the tensor
#: that they write to, whatever is added.
FUNCTIONS: dict[Callable[..., Any], str] = {
    operator.add: "add",
    torch.add: "add",
    _aten.add.Tensor: "add",
    operator.mul: "mul",
    torch.mul: "mul",
    _aten.mul.Tensor: "mul",
}
METHODS = {"add": "add", "__add__": "add", "mul": "mul", "__mul__": "mul"}


class Epilogue(PassBase):
    """``act(linear(x))``, ``linear(x) + other`` and ``linear(x) * other`` become one call each, and so
    does an activation that a sum or product follows.

    Only where nothing else uses what stands between. Runs after ``Chain``: a residual is added to
    what that makes, too.
    """

    def requires(self, graph_module: fx.GraphModule) -> None:
        check_rewritten(graph_module)

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for node in list(graph_module.graph.nodes):
            modified |= _activate(graph_module, node) or _combine(graph_module, node)
        return PassResult(graph_module, modified)


def _activate(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    call = linear_call(node.args[0]) if node.args else None
    name = activation(graph_module, node, call.dtype) if call is not None else None
    if call is None or name is None:
        return False
    sizes = (call.out_features, call.in_features, call.dtype, call.threads)
    args = (call.x, call.packed, call.bias, None, *sizes, name)
    return _fuse(graph_module, node.args[0], node, ops.linear_fused, args, {})


def _combine(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    name = _combination(node)
    if name is None:
        return False
    for y, other in (node.args, node.args[::-1]):
        if other.op == "get_attr":  # type: ignore[union-attr]
            continue  # a constant does not have the shape of a result but for one size of batch
        fused = _with_other(y, other, name)
        kwargs = order(other_first=other is node.args[0])
        if fused is not None and _fuse(graph_module, y, node, *fused, kwargs):
            return True
    return False


def _combination(node: fx.Node) -> str | None:
    """Whether a node adds or multiplies two values of the graph; None where it does neither."""
    name = None
    if node.op == "call_function":
        name = FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    elif node.op == "call_method":
        name = METHODS.get(str(node.target))
    values = len(node.args) == 2 and all(isinstance(value, fx.Node) for value in node.args)
    return name if values and node.kwargs in ({}, {"alpha": 1}) else None


def _with_other(y: Any, other: Any, name: str) -> tuple[Callable, tuple] | None:
    """The call that computes ``y`` and adds ``other`` to it, or multiplies; None where ``y`` is no call
    that can."""
    call = linear_call(y)
    if call is not None:
        sizes = (call.out_features, call.in_features, call.dtype, call.threads)
        return linear_with, (call.x, call.packed, call.bias, other, *sizes, name)
    if y.target is ops.linear_fused and y.args[3] is None:
        return linear_with, (*y.args[:3], other, *y.args[4:8], f"{y.args[8]} {name}")
    if y.target is ops.mlp and y.args[7] is None and name == "add":
        return mlp_with, (*y.args[:7], other, *y.args[8:14])
    return None


def _fuse(
    graph_module: fx.GraphModule,
    y: Any,
    node: fx.Node,
    function: Callable,
    args: tuple,
    kwargs: dict[str, Any],
) -> bool:
    """Put one call in the place of ``node`` and of ``y``, which it uses."""
    if not is_used_once(y) or not can_move(graph_module, y, node):
        return False
    graph = graph_module.graph
    with graph.inserting_before(node):
        new = graph.call_function(function, args, kwargs)
    node.replace_all_uses_with(new, propagate_meta=False)
    graph.erase_node(node)
    graph.erase_node(y)
    return True
