"""Which node of a graph is an activation that the operators can apply themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsparse.epilogues import find_function, find_module

from .kinds import has_hooks

_aten = torch.ops.aten

#: Functions that write to their input, and what they compute.
_IN_PLACE: dict[Any, Any] = {
    torch.relu_: torch.relu,
    torch.sigmoid_: torch.sigmoid,
    torch.tanh_: torch.tanh,
    _aten.hardswish_.default: _aten.hardswish.default,
    _aten.relu_.default: _aten.relu.default,
    _aten.sigmoid_.default: _aten.sigmoid.default,
    _aten.silu_.default: _aten.silu.default,
    _aten.tanh_.default: _aten.tanh.default,
}


def activation(graph_module: fx.GraphModule, node: fx.Node, dtype: torch.dtype) -> str | None:
    """The name in ``fxsparse.epilogues`` of what ``node`` does to its first argument, a tensor of
    ``dtype``, and nothing more. It may do so in place."""
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        replaced = has_hooks(module) or "forward" in module.__dict__
        return None if replaced or len(node.args) != 1 else find_module(module, dtype)
    if node.op == "call_method":
        return find_function(str(node.target).removesuffix("_"), node.args, node.kwargs)
    if node.op != "call_function":
        return None
    return find_function(_IN_PLACE.get(node.target, node.target), node.args, node.kwargs)
