"""Tells each call of an operator whether another one follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxsparse import ops
from fxsparse.fused import linear_with, mlp_with

from .between import is_brief

#: The calls that use the pool, and the place of ``more`` among their arguments.
MORE: dict[Callable[..., Any], int] = {
    ops.linear: 7,
    ops.linears: 7,
    ops.linear_fused: 9,
    linear_with: 9,
    ops.mlp: 14,
    mlp_with: 14,
}


class Follow(PassBase):
    """Sets ``more`` of each call that another one follows with nothing between them that needs torch's
    threads. Runs last: it looks at the calls as they stay."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        follows = False
        for node in reversed(graph_module.graph.nodes):
            place = MORE.get(node.target) if node.op == "call_function" else None
            if place is not None:
                node.args = (*node.args[:place], follows)
                follows = True
            elif not is_brief(graph_module, node):
                follows = False
        return PassResult(graph_module, True)
