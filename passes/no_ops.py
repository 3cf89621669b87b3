"""Takes out of a graph what does nothing, so that it stands between no two nodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from .calls import may_write
from .kinds import has_hooks

#: Functions of x, p and whether it is training.
_DROPOUTS = (F.dropout, torch.dropout, torch.ops.aten.dropout.default)


class NoOps(PassBase):
    """Takes out ``nn.Identity``, and dropouts that never drop anything.

    ``inference``: the graph is run in evaluation only, so every ``nn.Dropout`` can go; otherwise one
    that has ``p=0`` does.
    """

    def __init__(self, inference: bool) -> None:
        super().__init__()
        self.inference = inference

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        modified = False
        for node in list(graph_module.graph.nodes):
            if not node.args or not isinstance(node.args[0], fx.Node):
                continue
            if self._module_does_nothing(graph_module, node) or _function_does_nothing(node):
                node.replace_all_uses_with(node.args[0])
                graph_module.graph.erase_node(node)
                modified = True
        return PassResult(graph_module, modified)

    def _module_does_nothing(self, graph_module: fx.GraphModule, node: fx.Node) -> bool:
        if node.op != "call_module" or len(node.args) != 1:
            return False
        module = graph_module.get_submodule(str(node.target))
        if has_hooks(module) or "forward" in module.__dict__:
            return False
        if type(module) is nn.Dropout and not self.inference:
            # In training it gives a copy of x, which is no other thing unless somebody writes to x or it.
            return module.p == 0 and not _written_later(graph_module, node)
        return type(module) in (nn.Identity, nn.Dropout)


def _written_later(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether what comes after ``node`` may write to memory, be it the caller, who is given it."""
    each = node.next
    while each.op != "output":
        if may_write(graph_module, each):
            return True
        each = each.next
    return each in node.users


def _function_does_nothing(node: fx.Node) -> bool:
    """A dropout that a graph has with ``training=False`` for good."""
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return False
    default = node.target is F.dropout
    given = node.kwargs.get("training", node.kwargs.get("train", default))
    return (node.args[2] if len(node.args) > 2 else given) is False
