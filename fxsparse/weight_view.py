"""The stand-in for a packed weight: right shape, dtype and device, no storage."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .packing import header, unpack

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class WeightView(torch.Tensor):
    """A weight that lives only in packed form, for code that reads ``module.weight``.

    ``shape``, ``dtype``, ``device`` and ``requires_grad`` (always ``False``) cost nothing. Any
    operation on it rebuilds the dense weight for that one operation.
    """

    packed: torch.Tensor

    @staticmethod
    def __new__(
        cls, packed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> WeightView:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        self.packed = packed
        return self

    @classmethod
    def of(cls, packed: torch.Tensor) -> WeightView:
        """The stand-in for what ``packed`` says it holds, in the orientation that was packed."""
        head = header(packed)
        return cls(packed, head.shape[::-1] if head.transposed else head.shape, head.dtype)

    def dense(self) -> torch.Tensor:
        """The dense weight, bit for bit."""
        return unpack(self.packed)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in _SAME:
            return WeightView(args[0].packed, tuple(args[0].shape), args[0].dtype)
        if func._schema.is_mutable and _is_written(func._schema, args, kwargs or {}):
            raise _read_only(str(func))
        args, kwargs = tree_map_only(WeightView, WeightView.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def data(self) -> WeightView:
        return WeightView(self.packed, tuple(self.shape), self.dtype)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise _read_only("assignment to data")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _read_only("assignment")

    def requires_grad_(self, requires_grad: bool = True) -> WeightView:
        if requires_grad:
            raise RuntimeError(
                "a packed weight has no gradient: expected requires_grad_(False); to train it, go back "
                "with fxsparse.to_dense(module)"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightView:
        from copy import deepcopy

        return WeightView(deepcopy(self.packed, memo), tuple(self.shape), self.dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return WeightView, (self.packed, tuple(self.shape), self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightView(shape={tuple(self.shape)}, dtype={self.dtype}, packed={self.packed.numel()} bytes)"


def _read_only(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} would write to a packed weight, which is read-only: go back with "
        "fxsparse.to_dense(module), change the weight there and compile again"
    )


def _is_written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument that the operator writes to is a stand-in."""
    given = {**{a.name: value for a, value in zip(schema.arguments, args)}, **kwargs}
    written = (
        given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write
    )
    return any(isinstance(value, WeightView) for value in written)
