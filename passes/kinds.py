"""Kinds of modules that own weights: which are multiplies we rewrite, and why the others stay."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fxsparse.modules import HOOKS, STATE_HOOKS
from fxsparse.source import reads_parameters

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
    """Whether a module is ``nn.Linear`` and nothing more: what packing it would lose is not there.

    A subclass is somebody's own, as are a replaced forward, further tensors, and a bias of a shape
    that only broadcasts.
    """
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    if any(getattr(module, hooks, None) for hooks in STATE_HOOKS):
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    is_whole = set(module._parameters) == {"weight", "bias"} and not module._buffers
    if weight is None or weight.dim() != 2 or not is_whole or module._modules:
        return False
    return bias is None or (tuple(bias.shape) == weight.shape[:1] and bias.dtype == weight.dtype)


def is_plain_linear(module: nn.Module) -> bool:
    """A linear that no hook observes: a node can take its place."""
    return is_linear(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in HOOKS)


def forward_reads_parameters(module: nn.Module) -> str | None:
    """Why the weights below a module must stay parameters; None where they need not."""
    kind = type(module)
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if kind.__module__.startswith("torch.") or code is None:
        return None
    reads = reads_parameters(code)
    if reads == "first" and any(p.dim() < 2 for p in module.parameters()):
        return None  # one is left to be looked at
    return f"{kind.__name__}.forward goes through its parameters" if reads else None


def module_weights(module: nn.Module) -> list[tuple[str, str, str | None]]:
    """The weights of one module as (attribute, operation, reason to stay dense or None)."""
    kind = type(module)
    if is_linear(module):
        return [("weight", "nn.Linear", None)]
    if isinstance(module, nn.Linear):
        reason = f"this {kind.__name__} is more than an nn.Linear"
        if module._parameters.get("weight") is None:
            reason = "its weight is recomputed at every call (hook or parametrization), or a buffer"
        return [(name, "nn.Linear", reason) for name in _matrices(module)]
    for cls, op, reason in KEPT:
        if isinstance(module, cls):
            return [(name, op, reason) for name in _matrices(module)]
    if f"{kind.__module__}.{kind.__qualname__}" == _TRANSFORMERS_CONV1D:
        return [("weight", "Conv1D", "transformers' Conv1D is not rewritten yet")]
    if isinstance(module, ParametrizationList):
        reason = "it is behind a parametrization"
        return [(name, "parametrization", reason) for name in _matrices(module)]
    holds_only = isinstance(module, (nn.ParameterList, nn.ParameterDict))
    if kind.__module__.startswith("torch.") and not holds_only:
        return []
    reason = f"{kind.__name__}.forward was not traced, so how it reads this weight is not known"
    if holds_only:
        reason = f"it is read from a {kind.__name__} by a forward that was not traced"
    return [(name, "parameter", reason) for name in _matrices(module)]


def _matrices(module: nn.Module) -> list[str]:
    tensors: dict[str, torch.Tensor | None] = {**module._parameters}
    if isinstance(module, nn.Linear):
        tensors.update(module._buffers)
    return [name for name, t in tensors.items() if t is not None and t.dim() >= 2]
