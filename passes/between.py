"""Which nodes may stand between two sparse linears that the pool's threads stay awake for.

What computes with torch's own threads may not: ours would keep them from the CPU. Element-wise
operations use torch's threads too from 32768 elements on, but a linear that is as large by then
loses nothing by the few microseconds that its threads stay awake in vain.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from fxsparse.epilogues import find_module

# Names of functions and methods, with neither the underscores of methods in place and of operators
# nor the namespace of exported ones.
_VIEWS = """
    chunk clone contiguous detach device dim dtype expand expand_as flatten float getattr getitem mT
    narrow permute reshape select shape size split squeeze swapaxes T t to transpose type unbind
    unflatten unsqueeze view view_as
"""
_ELEMENTWISE = """
    abs add addcmul alpha_dropout celu clamp clamp_max clamp_min div dropout eq exp elu floordiv ge
    gelu gt hardsigmoid hardswish hardtanh iadd imul isub itruediv leaky_relu le lt masked_fill
    maximum minimum mish mul ne neg pow radd relu relu6 rmul rsqrt rsub selu sigmoid silu softplus
    softsign sqrt square sub tanh truediv where
"""
NAMES = frozenset((_VIEWS + _ELEMENTWISE).split())
MODULES: tuple[type[nn.Module], ...] = (
    *(nn.AlphaDropout, nn.CELU, nn.Dropout, nn.ELU, nn.Flatten, nn.GELU, nn.Hardsigmoid),
    *(nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU),
    *(nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Unflatten),
)


def is_brief(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node takes a few microseconds and no other threads."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        return type(module) in MODULES or find_module(module, torch.float32) is not None
    return node.op in ("call_function", "call_method") and operation(node.target) in NAMES


def operation(target: object) -> str:
    """The name of a function, method or operator, without namespace, overload and underscores."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[-1]
    else:
        name = str(getattr(target, "__name__", target))
    return name.strip("_")
