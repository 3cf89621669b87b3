"""The stand-in for a packed weight: right shape, dtype and device, no storage."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from .. import ops
from ..packing import Header, header, unpack


@dataclass(frozen=True)
class Place:
    """What a view says of itself; asked of the tensor, each would take microseconds."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class WeightView(torch.Tensor):
    """A weight that lives only in packed form, for code that reads ``module.weight``.

    ``shape``, ``dtype``, ``device`` and ``requires_grad`` (always ``False``) cost nothing. Multiplies
    by it, and by views of it (transposed, one expert of several, rows), are calls of the operator;
    looking rows up unpacks those. Any other operation rebuilds the dense weight for that one
    operation.

    It is a tensor over memory that is not there: its strides and offset say which elements of the
    dense weight it stands for. Of a stack, ``blocks`` are the matrices that this memory would hold,
    one after the other.
    """

    packed: torch.Tensor
    head: Header
    blocks: tuple[int, ...]
    threads: int
    place: Place

    @staticmethod
    def __new__(
        cls,
        packed: torch.Tensor,
        head: Header,
        blocks: tuple[int, ...],
        threads: int,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> WeightView:
        # Whatever mode is on: a view of an ordinary tensor is one, and no mode has to know of it.
        with without_modes(), torch.inference_mode(False):
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                size,
                strides=stride,
                storage_offset=offset,
                dtype=dtype,
                device=packed.device,
            )
        self.packed, self.head, self.blocks, self.threads = packed, head, blocks, threads
        self.place = Place(tuple(size), tuple(stride), int(offset), dtype)
        return self

    @classmethod
    def of(cls, packed: torch.Tensor, threads: int = 0, head: Header | None = None) -> WeightView:
        """The stand-in for what ``packed`` says it holds, in the form that was packed."""
        head = head or header(packed)
        size = head.dense_shape
        blocks = tuple(range(head.blocks or 1))
        stride = make_contiguous_strides_for(size)
        return cls(packed, head, blocks, threads, head.dtype, size, stride, 0)

    def like(
        self,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        *,
        blocks: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> WeightView:
        """Another view of the same weight."""
        return WeightView(
            self.packed,
            self.head,
            self.blocks if blocks is None else blocks,
            self.threads,
            dtype or self.place.dtype,
            size,
            stride,
            offset,
        )

    def over(self, packed: torch.Tensor) -> WeightView:
        """The same view of what another buffer holds, which is as the first one's."""
        _, (_, _, *rest) = self.__reduce_ex__(2)
        return WeightView(packed, header(packed), *rest)

    def part(self, i: int) -> torch.Tensor:
        """The packed matrix ``i`` of a stack, or the single one."""
        if not self.head.offsets:
            return self.packed
        return self.packed[self.head.offsets[i] : self.head.offsets[i + 1]]

    def phantom(self) -> torch.Tensor:
        """The same view as a tensor on the meta device."""
        rows, cols = self.head.shape
        place = self.place
        memory = torch.empty(len(self.blocks) * rows * cols, dtype=place.dtype, device="meta")
        return memory.as_strided(place.size, place.stride, place.offset)

    def dense(self) -> torch.Tensor:
        """The part of the dense weight that this is a view of, bit for bit."""
        size, stride, offset = self.place.size, self.place.stride, self.place.offset
        each = self.head.shape[0] * self.head.shape[1]
        if 0 in size:
            return torch.empty(size, dtype=self.place.dtype)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride))
        first = offset // each
        read = [self._matrix(i) for i in self.blocks[first : last // each + 1]]
        memory = read[0] if len(read) == 1 else torch.stack(read)
        return memory.as_strided(size, stride, offset - first * each).to(self.place.dtype)

    def _matrix(self, i: int) -> torch.Tensor:
        dense = ops.unpack(self.part(i), *self.head.shape, self.head.dtype)
        return dense.t().contiguous() if self.head.transposed else dense

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For torch.compile: the tensors inside, and all else."""
        _, (_, *rest) = self.__reduce_ex__(2)
        return ["packed"], tuple(rest)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], rest: Any, size: Any, stride: Any
    ) -> WeightView:
        return WeightView(inner["packed"], *rest)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        from .functions import dispatch_function

        return dispatch_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        from .products import dispatch

        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> WeightView:
        return self.like(self.place.size, self.place.stride, self.place.offset)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise read_only("assignment to data")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise read_only("assignment")

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> WeightView:
        if requires_grad:
            raise RuntimeError(
                "a packed weight has no gradient: expected requires_grad_(False); to train it, go back "
                "with fxsparse.to_dense(module)"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightView:
        _, (packed, *rest) = self.__reduce_ex__(2)
        return WeightView(deepcopy(packed, memo), *rest)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        place = self.place
        rest = (self.blocks, self.threads, place.dtype, place.size, place.stride, place.offset)
        return WeightView, (self.packed, self.head, *rest)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightView(shape={tuple(self.shape)}, dtype={self.dtype}, packed={self.packed.numel()} bytes)"


def stand_in(packed: torch.Tensor, threads: int) -> torch.Tensor:
    """The weight that ``packed`` holds, for a multiply in a graph that is not a call of the operator.

    A :class:`WeightView`, or the dense weight while torch compiles or exports.
    """
    if isinstance(packed, fx.Proxy):  # unpickling a graph traces its code again
        return packed.tracer.create_proxy("call_function", stand_in, (packed, threads), {})
    return unpack(packed) if torch.compiler.is_compiling() else WeightView.of(packed, threads)


def without_modes() -> AbstractContextManager[object]:
    """Turns off whoever watches or replaces operators, where anybody may."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return _disable_current_modes()
    return nullcontext()


def densify(args: Any) -> Any:
    """The same arguments with dense weights for stand-ins."""
    return tree_map_only(WeightView, WeightView.dense, args)


def read_only(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} would write to a packed weight, which is read-only: go back with "
        "fxsparse.to_dense(module), change the weight there and compile again"
    )
