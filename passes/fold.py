"""Pruning masks become plain weights.

``torch.nn.utils.prune`` keeps ``weight_orig`` (a parameter), ``weight_mask`` (a buffer) and
``weight`` (recomputed by a forward pre-hook): three times the weight. Here the product becomes the
parameter ``weight`` again, as ``prune.remove`` would leave it, without running forward.
"""

from __future__ import annotations

import torch
from torch.nn.utils.prune import BasePruningMethod


def pruning_hooks(module: torch.nn.Module) -> list[tuple[int, BasePruningMethod]]:
    """The pruning pre-hooks of one module, by their key in ``_forward_pre_hooks``."""
    hooks = module._forward_pre_hooks.items()
    return [(key, hook) for key, hook in hooks if isinstance(hook, BasePruningMethod)]


def has_masks(model: torch.nn.Module) -> bool:
    """Whether any module still carries a pruning mask."""
    return any(pruning_hooks(module) for module in model.modules())


def fold_masks(model: torch.nn.Module) -> None:
    """Fold every pruning mask below ``model``, in place, module by module."""
    for module in model.modules():
        for key, hook in pruning_hooks(module):
            _fold(module, key, hook._tensor_name)


def _fold(module: torch.nn.Module, key: int, name: str) -> None:
    original, mask = module._parameters[name + "_orig"], module._buffers[name + "_mask"]
    assert original is not None and mask is not None
    with torch.no_grad():
        product = mask.to(original.dtype) * original
    weight = torch.nn.Parameter(product, requires_grad=original.requires_grad)
    del module._forward_pre_hooks[key]
    module._forward_pre_hooks_with_kwargs.pop(key, None)
    del module._buffers[name + "_mask"]
    module.__dict__.pop(name, None)
    # Same place among the parameters as a module that was never pruned.
    renamed: dict[str, torch.nn.Parameter | None] = {name: weight}
    del module._parameters[name + "_orig"]
    renamed.update(module._parameters)
    module._parameters.clear()
    module._parameters.update(renamed)
