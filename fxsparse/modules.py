"""``SparseLinear``, the module behind one rewritten ``nn.Linear``."""

from __future__ import annotations

import copy

import torch

from . import ops
from .cost import choose
from .options import check_threads, check_unsupported
from .packing import SUFFIX, Header, count_nonzeros, header, is_packed, pack, unreadable
from .state import guard_packed, release_packed
from .weight_view import WeightView

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


class SparseLinear(torch.nn.Linear):
    """``y = x @ W.T + bias`` with ``W`` in packed form.

    Shape: x is ``(..., in_features)`` in the weight's dtype, y is ``(..., out_features)``.

    The packed weight is the buffer ``weight_packed``; ``bias`` is the parameter it was. ``weight``
    has the dense weight's shape, dtype and device but no storage (see :class:`WeightView`). It is
    an ``nn.Linear`` for code that asks; :meth:`from_linear` makes one.
    """

    weight_packed: torch.Tensor
    weight_dtype: torch.dtype
    threads: int

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

    @staticmethod
    def convert(linear: torch.nn.Linear, packed: torch.Tensor, threads: int | None) -> None:
        """Make an ``nn.Linear`` a ``SparseLinear`` in place: whoever holds it, holds the new one."""
        own_dicts(linear)
        del linear._parameters["weight"]
        linear.__class__ = SparseLinear
        linear._hold(packed, threads)  # type: ignore[operator]

    def restore(self, weight: torch.nn.Parameter) -> None:
        """Make this an ``nn.Linear`` with a dense ``weight`` again, in place."""
        del self._buffers["weight" + SUFFIX], self.weight_dtype, self.threads
        release_packed(self)
        self.__class__ = torch.nn.Linear  # type: ignore[assignment]
        bias = self._parameters.pop("bias")
        self._parameters.update(weight=weight, bias=bias)  # in the order of a new nn.Linear

    def _hold(self, packed: torch.Tensor, threads: int | None) -> None:
        self.weight_dtype = header(packed).dtype
        self.threads = threads or 0
        self.register_buffer("weight" + SUFFIX, packed)
        guard_packed(self)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dense weight's stand-in: shape, dtype and device without storage."""
        shape = (self.out_features, self.in_features)
        if torch.compiler.is_compiling():  # what only its shape or dtype is read of falls away
            return ops.unpack(self.weight_packed, *shape, self.weight_dtype)
        if is_packed(self.weight_packed):
            return WeightView.of(self.weight_packed, self.threads)
        head = Header("", self.weight_dtype, shape, 0, False, False, False)  # without values yet
        return WeightView.of(self.weight_packed, self.threads, head)

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
        if not is_packed(self.weight_packed):
            return super().extra_repr()
        head = header(self.weight_packed)
        return f"{super().extra_repr()}, nnz={head.nnz}, format={head.format}"
