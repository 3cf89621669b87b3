"""Linears that a forward calls one after the other with the same tensor: one call computes them all.

The first that is asked computes the others too; they hand out their part when they are asked for the
very same tensor. What is kept lives no longer than the forward of the module that holds them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from ..fused_ops import run_linears
from . import SparseLinear


class SiblingLinear(SparseLinear, torch.nn.Linear):  # type: ignore[override]
    """A :class:`SparseLinear` that its parent calls together with others."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and (run := _current.run) is not None:
            output = run.output(self, input)
            if output is not None:
                return output
        return super().forward(input)


_packed, _bias = itemgetter("weight_packed"), itemgetter("bias")


class Group:
    """Siblings that can be computed by one call: ``members[0]`` is the one that is asked first."""

    def __init__(self, members: list[SparseLinear]) -> None:
        first = members[0]
        self.members = members
        self.places = {member: i for i, member in enumerate(members)}
        # Their tensors are looked up in these at each call, at a tenth of what an attribute takes.
        self.buffers = [member._buffers for member in members]
        self.parameters = [member._parameters for member in members]
        self.sizes = [member.out_features for member in members], first.in_features
        self.dtype, self.threads = first.weight_dtype, first.threads

    def compute(self, x: torch.Tensor) -> list[torch.Tensor | None] | None:
        """What the members give for ``x``; None where each is to compute for itself: where a gradient
        is wanted, under autocast, and to say what is wrong with ``x`` or a bias."""
        if type(x) is not torch.Tensor or x.dtype is not self.dtype or _autocast():
            return None
        try:
            weights, biases = [*map(_packed, self.buffers)], [*map(_bias, self.parameters)]
        except KeyError:
            return None
        if torch.is_grad_enabled() and (
            x.requires_grad or any(bias is not None and bias.requires_grad for bias in biases)
        ):
            return None
        return run_linears(x, weights, biases, *self.sizes, self.dtype, self.threads)


_autocast = torch._C._is_any_autocast_enabled


class Run:
    """One run of a parent's forward, in one thread: what was computed ahead, and of which tensor."""

    x: torch.Tensor | None = None
    version: int | None
    grad: bool
    group: Group
    outputs: list[torch.Tensor | None]

    def __init__(self, groups: dict[SparseLinear, Group]) -> None:
        self.groups = groups

    def output(self, member: SparseLinear, x: torch.Tensor) -> torch.Tensor | None:
        """What ``member`` gives for ``x``, where it was computed or can be together with others."""
        is_known = x is self.x and x is not None
        if is_known and (place := self.group.places.get(member)) and self._is_as_it_was(x):
            output, self.outputs[place] = self.outputs[place], None
            if output is not None:
                if place == len(self.outputs) - 1:
                    self.x = None
                return output
        group = self.groups.get(member)
        if group is None or (outputs := group.compute(x)) is None:
            return None
        # Of a tensor that was made in inference mode, torch does not count the writes.
        self.version = None if x.is_inference() else x._version
        self.x, self.grad = x, torch.is_grad_enabled()
        self.group, self.outputs = group, outputs
        output, outputs[0] = outputs[0], None
        return output

    def _is_as_it_was(self, x: torch.Tensor) -> bool:
        if self.version is not None and self.version != x._version:
            return False
        return torch.is_grad_enabled() == self.grad and not _autocast()


class _Current(threading.local):
    run: Run | None = None


_current = _Current()


def run_together(
    groups: dict[SparseLinear, Group],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``forward(*args, **kwargs)``, in which the members of ``groups`` are computed together."""
    outer, _current.run = _current.run, Run(groups)
    try:
        return forward(*args, **kwargs)
    finally:
        _current.run = outer
