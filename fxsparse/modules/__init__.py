"""The modules behind rewritten layers of torch: a linear, and 1x1 convolutions."""

from __future__ import annotations

import copy

import torch

from .. import ops
from ..cost import choose
from ..options import check_threads, check_unsupported
from ..packing import SUFFIX, Header, count_nonzeros, header, is_packed, pack, unreadable
from ..stand_in.weight_view import WeightView
from .state import guard_packed, release_packed

#: Where an nn.Module keeps the hooks that run with its forward.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: And those that run with its state_dict.
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def own_dicts(module: torch.nn.Module) -> None:
    """Give a module its own dicts of parameters, hooks, ...: a shallow copy of a module shares them."""
    for key, value in module.__dict__.items():
        if isinstance(value, dict):
            module.__dict__[key] = copy.copy(value)


class SparseModule(torch.nn.Module):
    """What has taken the place of a module of torch, whose class comes next among its bases.

    The packed weight is the buffer ``weight_packed``; ``bias`` is the parameter it was. ``weight``
    has the dense weight's shape, dtype and device but no storage (see :class:`WeightView`).
    """

    weight_packed: torch.Tensor
    weight_dtype: torch.dtype
    threads: int

    @classmethod
    def convert(cls, module: torch.nn.Module, packed: torch.Tensor, threads: int | None) -> None:
        """Make a module of torch one of these in place: whoever holds it, holds the new one."""
        own_dicts(module)
        del module._parameters["weight"]
        module.__class__ = cls
        module._hold(packed, threads)  # type: ignore[operator]

    def restore(self, weight: torch.nn.Parameter) -> None:
        """Make this the module of torch with a dense ``weight`` again, in place."""
        del self._buffers["weight" + SUFFIX], self.weight_dtype, self.threads
        release_packed(self)
        self.__class__ = self._dense_class()  # type: ignore[assignment]
        bias = self._parameters.pop("bias")
        self._parameters.update(weight=weight, bias=bias)  # in the order of a new module

    @classmethod
    def _dense_class(cls) -> type[torch.nn.Module]:
        return cls.__bases__[-1]

    def _hold(self, packed: torch.Tensor, threads: int | None) -> None:
        self.weight_dtype = header(packed).dtype
        self.threads = threads or 0
        self.register_buffer("weight" + SUFFIX, packed)
        guard_packed(self)

    def _weight_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The packed weight and the bias. nn.Module.__getattr__ would take 0.6 us for each."""
        try:
            return self._buffers["weight_packed"], self._parameters["bias"]  # type: ignore[return-value]
        except KeyError:  # pruned or parametrized since
            return self.weight_packed, self.bias  # type: ignore[return-value]

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight's stand-in: shape, dtype and device without storage."""
        rows, cols, *ones = self._weight_shape()
        if torch.compiler.is_compiling():  # what only its shape or dtype is read of falls away
            dense = ops.unpack(self.weight_packed, rows, cols, self.weight_dtype)
            return dense.view(rows, cols, *ones) if ones else dense
        if is_packed(self.weight_packed):
            return WeightView.of(self.weight_packed, self.threads)
        head = Header(  # without values yet
            "", self.weight_dtype, (rows, cols), 0, False, False, False, trailing=len(ones)
        )
        return WeightView.of(self.weight_packed, self.threads, head)

    def extra_repr(self) -> str:
        if not is_packed(self.weight_packed):
            return super().extra_repr()
        head = header(self.weight_packed)
        return f"{super().extra_repr()}, nnz={head.nnz}, format={head.format}"


class SparseLinear(SparseModule, torch.nn.Linear):  # type: ignore[override]
    """``y = x @ W.T + bias`` with ``W`` in packed form.

    Shape: x is ``(..., in_features)`` in the weight's dtype, y is ``(..., out_features)``.

    It is an ``nn.Linear`` for code that asks; :meth:`from_linear` makes one.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        bias: torch.nn.Parameter | None = None,
        threads: int | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = header(packed).shape
        self.register_parameter("bias", bias)
        self._hold(packed, threads)

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
        if type(linear) is not torch.nn.Linear:
            raise TypeError(f"expected an nn.Linear, got {type(linear).__name__}")
        if any(getattr(linear, hooks) for hooks in HOOKS) or "forward" in linear.__dict__:
            raise ValueError(
                "expected an nn.Linear without hooks or a replaced forward (they would be lost): "
                "remove them, or use fxsparse.compile"
            )
        check_unsupported(values, batch_hint, prefer)
        check_threads(threads)
        weight = linear.weight
        if (reason := unreadable(weight)) is not None:
            raise ValueError(f"expected a weight that can be packed: {reason}")
        choice = choose(
            (linear.out_features, linear.in_features),
            count_nonzeros(weight),
            weight.dtype,
            batch_hint=batch_hint,
            prefer=prefer,
        )
        result = cls(pack(weight, format=choice.format), linear.bias, threads)
        return result.train(linear.training)

    def _weight_shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed, bias = self._operands()
        return ops.run_linear(
            input,
            packed,
            bias,
            self.out_features,
            self.in_features,
            self.weight_dtype,
            self.threads,
        )


class _SparseConv(SparseModule):
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]

    def _weight_shape(self) -> tuple[int, ...]:
        return self.out_channels, self.in_channels, *self.kernel_size

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed, bias = self._operands()
        return ops.run_conv1x1(
            input,
            packed,
            bias,
            self.out_channels,
            self.in_channels,
            self.weight_dtype,
            self.threads,
            len(self.kernel_size),
        )


class SparseConv1d(_SparseConv, torch.nn.Conv1d):  # type: ignore[override]
    """A 1x1 ``nn.Conv1d`` whose weight is packed: x is ``(batch, in_channels, length)``."""


class SparseConv2d(_SparseConv, torch.nn.Conv2d):  # type: ignore[override]
    """A 1x1 ``nn.Conv2d`` whose weight is packed: x is ``(batch, in_channels, height, width)``."""
