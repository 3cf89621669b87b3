"""Kinds of modules that own weights: which are multiplies we rewrite, and why the others stay."""

from __future__ import annotations

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: Modules whose weights are reported and kept: class, name of the operation, reason.
KEPT: tuple[tuple[type[nn.Module], str, str], ...] = (
    (nn.Bilinear, "bilinear", "nn.Bilinear is not a plain matrix multiply"),
    (nn.modules.conv._ConvNd, "conv", "convolutions are not rewritten yet"),
    (nn.RNNBase, "rnn", "recurrent layers are not rewritten yet"),
    (nn.RNNCellBase, "rnn", "recurrent cells are not rewritten yet"),
    (nn.MultiheadAttention, "attention", "nn.MultiheadAttention is not rewritten yet"),
)

#: Modules that read the weights of their children directly, past the children's forward.
READS_CHILDREN: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

_TRANSFORMERS_CONV1D = "transformers.pytorch_utils.Conv1D"


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes what ``nn.Linear`` computes from a weight of its own."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
    )


def is_plain_linear(module: nn.Module) -> bool:
    """A linear whose weight is a plain parameter and that no hook observes: a node can replace it."""
    return is_linear(module) and _has_weight(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def module_weights(module: nn.Module) -> list[tuple[str, str, str | None]]:
    """The weights of one module as (attribute, operation, reason to stay dense or None)."""
    if isinstance(module, nn.Linear):
        if not _has_weight(module):
            return [
                (
                    name,
                    "nn.Linear",
                    "its weight is recomputed at every call (hook or parametrization)",
                )
                for name, p in module._parameters.items()
                if p is not None and p.dim() >= 2
            ]
        reason = None
        if not is_linear(module):
            reason = f"{type(module).__name__} has a forward of its own"
        return [("weight", "nn.Linear", reason)]
    for cls, op, reason in KEPT:
        if isinstance(module, cls):
            return [(name, op, reason) for name in _matrices(module)]
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" == _TRANSFORMERS_CONV1D:
        return [("weight", "Conv1D", "transformers' Conv1D is not rewritten yet")]
    if kind.__module__.startswith("torch.") and not isinstance(module, torch.fx.GraphModule):
        return []
    reason = f"{kind.__name__}.forward was not traced, so how it reads this weight is not known"
    return [(name, "parameter", reason) for name in _matrices(module)]


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), nn.Parameter)


def _matrices(module: nn.Module) -> list[str]:
    return [name for name, p in module._parameters.items() if p is not None and p.dim() >= 2]
