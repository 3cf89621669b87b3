"""``SparseLinear``, the module behind one rewritten ``nn.Linear``."""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from .options import check_threads, check_unsupported
from .packing import SUFFIX, header, pack
from .state import guard_packed
from .weight_view import WeightView


class SparseLinear(torch.nn.Module):
    """``y = x @ W.T + bias`` with ``W`` in packed form.

    Shape: x is ``(..., in_features)`` in the weight's dtype, y is ``(..., out_features)``.

    The packed weight is the buffer ``weight_packed``; ``bias`` is the parameter it was. ``weight``
    has the dense weight's shape, dtype and device but no storage (see :class:`WeightView`).
    """

    weight_packed: torch.Tensor

    def __init__(
        self,
        packed: torch.Tensor,
        bias: torch.nn.Parameter | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        head = header(packed)
        self.out_features, self.in_features = head.shape
        self.weight_dtype = head.dtype
        self.threads = threads or 0
        self.register_buffer("weight" + SUFFIX, packed)
        self.register_parameter("bias", bias)
        guard_packed(self)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        values: torch.dtype | None = None,
        batch_hint: int | None = None,
        prefer: str = "memory",
        threads: int | None = None,
    ) -> SparseLinear:
        """Pack one ``nn.Linear``, whatever its sparsity. The bias is shared, the weight is copied.

        The options are those of :func:`fxsparse.compile`.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"expected an nn.Linear, got {type(linear).__name__}")
        check_unsupported(values, batch_hint, prefer)
        check_threads(threads)
        result = cls(pack(linear.weight), linear.bias, threads)
        return result.train(linear.training)

    @property
    def weight(self) -> WeightView:
        """The dense weight's stand-in: shape, dtype and device without storage."""
        return WeightView(self.weight_packed)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.linear(
            input,
            self.weight_packed,
            self.bias,
            self.out_features,
            self.in_features,
            self.weight_dtype,
            self.threads,
        )

    def extra_repr(self) -> str:
        head: Any = header(self.weight_packed) if not self.weight_packed.is_meta else None
        density = f", nnz={head.nnz}, format={head.format}" if head else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{density}"
        )
