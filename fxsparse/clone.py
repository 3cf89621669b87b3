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
    behind it, also in the list of a recurrent layer) are detached, those of sparse layouts cloned. Raises :class:`CaptureError` where something else cannot be copied.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in also}
    if share_parameters:  # and buffers that are views of parameters
        memory = {block for p in module.parameters() for block, size in storages(p) if size}
        views = [b for b in module.buffers() if storages(b)[0][0] in memory]
        memo.update((id(buffer), buffer) for buffer in views)
    for submodule in module.modules():
        for tensor in [*submodule._parameters.values(), *submodule._buffers.values()]:
            if isinstance(tensor, torch.nn.Parameter) and share_parameters:
                memo[id(tensor)] = tensor
            elif tensor is not None and tensor.layout != torch.strided:
                memo.setdefault(id(tensor), _copy(tensor))
        for value in submodule.__dict__.values():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach()
    try:
        clone = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}): "
            "compile with inplace=True and without example_inputs, or make copy.deepcopy(model) work"
        ) from error
    clone._compiled_call_impl = None
    return clone


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied
