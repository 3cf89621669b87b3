"""A copy of a module that shares its parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch

from .errors import CaptureError
from .memory import storages


def share_clone(
    module: torch.nn.Module, also: Iterable[torch.Tensor] = (), *, share_parameters: bool = True
) -> torch.nn.Module:
    """A deep copy that shares ``module``'s parameters and the tensors ``also``; buffers are copied.

    Tensors that ``deepcopy`` refuses (a pruned or weight-normed ``weight`` attribute with a graph
    behind it) are detached. Raises :class:`CaptureError` where something else cannot be copied.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in also}
    if share_parameters:  # and buffers that are views of parameters
        memory = {block for p in module.parameters() for block, size in storages(p) if size}
        views = [b for b in module.buffers() if storages(b)[0][0] in memory]
        memo.update((id(buffer), buffer) for buffer in views)
    for submodule in module.modules():
        if share_parameters:
            memo.update((id(p), p) for p in submodule._parameters.values() if p is not None)
        for value in submodule.__dict__.values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    try:
        clone = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}): "
            "compile with inplace=True and without example_inputs, or make copy.deepcopy(model) work"
        ) from error
    clone._compiled_call_impl = None
    return clone
