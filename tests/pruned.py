"""Pruned weights and models, made the same way in every test."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxsparse import ops
from fxsparse.fused import linear_with, mlp_with


def sparse_weight(rows: int, cols: int, sparsity: float = 0.9, dtype=torch.float32) -> torch.Tensor:
    """A random matrix with exactly ``round(sparsity * size)`` zeros."""
    weight = torch.randn(rows, cols, dtype=torch.float64) * 0.1 + 0.01
    weight.view(-1)[torch.randperm(rows * cols)[: round(sparsity * rows * cols)]] = 0
    return weight.to(dtype)


def prune(model: nn.Module, sparsity: float = 0.9) -> nn.Module:
    """Zero ``sparsity`` of every matrix of ``model`` at random, in place; returns ``model`` in eval."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                rows = parameter.shape[0]
                zeroed = sparse_weight(rows, parameter[0].numel(), sparsity, parameter.dtype)
                parameter.copy_(zeroed.view_as(parameter))
    return model.eval()


def operators_run(run: Callable[[], object]) -> Counter:
    """How often each operator runs in ``run()``, by its name: ``fxsparse.linear.default``, ..."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found[str(func)] += 1
            return func(*args, **(kwargs or {}))

    found: Counter = Counter()
    with Count():
        run()
    return found


def multiplies(graph: fx.Graph) -> int:
    """How many multiplies by packed weights the calls of a graph make, whether fused or not."""
    found = 0
    for node in graph.nodes:
        if node.target in (ops.linear, ops.linear_fused, linear_with):
            found += 1
        elif node.target in (ops.mlp, mlp_with):
            found += 2 if node.args[1] is None else 3
        elif node.target is ops.linears:
            found += len(node.args[1])
    return found
