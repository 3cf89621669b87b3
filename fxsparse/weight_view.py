"""The stand-in for a packed weight: right shape, dtype and device, no storage."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .packing import Header, header, unpack

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class WeightView(torch.Tensor):
    """A weight that lives only in packed form, for code that reads ``module.weight``.

    ``shape``, ``dtype``, ``device`` and ``requires_grad`` (always ``False``) cost nothing. Any
    operation on it rebuilds the dense weight for that one operation.
    """

    packed: torch.Tensor

    @staticmethod
    def __new__(cls, packed: torch.Tensor, head: Header | None = None) -> WeightView:
        head = head or header(packed)
        shape = head.shape[::-1] if head.transposed else head.shape
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=head.dtype, device=packed.device
        )
        self.packed = packed
        return self

    def dense(self) -> torch.Tensor:
        """The dense weight, bit for bit."""
        return unpack(self.packed)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in _SAME:
            return WeightView(args[0].packed)
        args, kwargs = tree_map_only(WeightView, WeightView.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> WeightView:
        if requires_grad:
            raise RuntimeError(
                "a packed weight has no gradient: expected requires_grad_(False); to train it, go back "
                "with fxsparse.to_dense(module)"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightView:
        from copy import deepcopy

        return WeightView(deepcopy(self.packed, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return WeightView, (self.packed,)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightView(shape={tuple(self.shape)}, dtype={self.dtype}, packed={self.packed.numel()} bytes)"
