"""Puts packed weights in the places of dense ones, weight by weight."""

from __future__ import annotations

import torch

from fxsparse.modules import SparseLinear
from fxsparse.packing import SUFFIX, pack
from fxsparse.state import guard_packed
from fxsparse.weight_view import WeightView

from .kinds import is_linear
from .record import Decision, Weight

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Installer:
    """Installs packed weights in module trees that are fixed but for what is installed.

    ``trees[0]`` is the result. Modules of the other trees run their own forward, so a matrix they
    read themselves leaves a :class:`WeightView` behind.
    """

    def __init__(self, trees: list[torch.nn.Module]) -> None:
        self.trees = trees
        self._parents: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        self._runs_itself = {id(module) for tree in trees[1:] for module in tree.modules()}
        seen = set()
        for tree in trees:
            for parent in tree.modules():
                if id(parent) in seen:
                    continue
                seen.add(id(parent))
                for name, child in parent._modules.items():
                    self._parents.setdefault(id(child), []).append((parent, name))

    def install(self, weight: Weight, decision: Decision) -> None:
        """Pack one weight and let go of its dense form. An error leaves every owner as it was."""
        assert weight.tensor is not None
        is_buffer = not isinstance(weight.tensor, torch.nn.Parameter)
        packed = pack(
            weight.tensor, transposed=weight.transposed, is_buffer=is_buffer, format=decision.format
        )
        assert packed.numel() == decision.stored_bytes
        for owner, name in weight.owners:
            if is_linear(owner) and name == "weight":
                self._replace(owner, packed, decision.threads)
            else:
                self._replace_attribute(owner, name, packed)
        weight.tensor = None
        weight.owners.clear()

    def _replace(self, linear: torch.nn.Module, packed: torch.Tensor, threads: int | None) -> None:
        bias = linear._parameters.get("bias")
        sparse = SparseLinear(packed, bias, threads)
        sparse.train(linear.training)
        for key in _HOOKS:
            sparse.__dict__[key] = linear.__dict__[key]
        for key, value in linear.__dict__.items():
            sparse.__dict__.setdefault(key, value)
        for parent, name in self._parents.get(id(linear), []):
            parent._modules[name] = sparse
        self.trees[:] = [sparse if tree is linear else tree for tree in self.trees]

    def _replace_attribute(self, owner: torch.nn.Module, name: str, packed: torch.Tensor) -> None:
        owner._parameters.pop(name, None)
        if name in owner._buffers:
            del owner._buffers[name]
        owner.register_buffer(name + SUFFIX, packed)
        guard_packed(owner)
        if id(owner) in self._runs_itself:
            owner.__dict__[name] = WeightView(packed)
