"""``SparseLSTM`` and its kin: torch's recurrent modules with packed weights.

They run torch's own forward, which checks its arguments and calls a function such as ``torch.lstm``
with the weights. The stand-ins of the packed ones take that call over.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ..packing import SUFFIX, Header, header
from ..stand_in.weight_view import WeightView, read_only
from . import own_dicts
from .recurrence import FUNCTIONS, PackedMatrix, dense, recurrent
from .state import guard_packed, release_packed

#: The parameters of a cell, in their order; a cell without biases has them as None.
CELL_NAMES = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]


class RecurrentWeight(WeightView, PackedMatrix):
    """A :class:`WeightView` of a whole matrix that torch's recurrent functions multiply by."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in FUNCTIONS:
            return recurrent(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


class SymbolicWeight(PackedMatrix):
    """The same in ``torch.compile`` and ``torch.export``, which cannot see a stand-in being made.

    Whatever else is asked of it is asked of the dense weight.
    """

    def __init__(self, packed: torch.Tensor, head: Header, threads: int) -> None:
        self.packed, self.head, self.threads = packed, head, threads
        self.shape, self.dtype = head.shape, head.dtype

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in FUNCTIONS:
            return recurrent(func, args, kwargs or {})
        return func(*dense(args), **dense(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense(), name)


class SparseRecurrent(nn.Module):
    """What the sparse recurrent modules share; see :meth:`convert`.

    A packed weight ``weight_hh_l0`` is the buffer ``weight_hh_l0_packed``. Read by its dense name it is
    a stand-in without storage (see :class:`WeightView`). Other weights and biases stay parameters.
    """

    dense_class: ClassVar[type[nn.Module]]
    packings: dict[str, tuple[Header, int]]  #: by name; and the most threads

    @staticmethod
    def convert(module: nn.Module, name: str, packed: torch.Tensor, threads: int | None) -> None:
        """Put ``packed`` in the place of the weight ``name``, and make ``module``, one of
        :data:`SPARSE_CLASSES` or what this made of it, the sparse class, in place."""
        if not isinstance(module, SparseRecurrent):
            own_dicts(module)
            module.__dict__.pop("_flat_weights", None)  # it would keep the dense weights
            module.__dict__["packings"] = {}
            module.__class__ = SPARSE_CLASSES[type(module)]
        module.__dict__["packings"][name] = header(packed), threads or 0
        del module._parameters[name]
        module.register_buffer(name + SUFFIX, packed)
        guard_packed(module)

    def restore(self, name: str, weight: nn.Parameter) -> None:
        """Make ``weight`` the parameter ``name`` again, and this torch's own module after the last."""
        del self._buffers[name + SUFFIX], self.packings[name]
        self._parameters[name] = weight
        if self.packings:
            return
        del self.packings
        release_packed(self)
        self.__class__ = self.dense_class  # type: ignore[assignment]
        if isinstance(self, nn.RNNBase):
            order = self._flat_weights_names
            self._init_flat_weights()
        else:
            order = CELL_NAMES
        for name in order:  # the order of a new module
            self._parameters[name] = self._parameters.pop(name)

    def __getattr__(self, name: str) -> Any:
        packing = self.__dict__.get("packings", {}).get(name)
        if packing is None:
            return super().__getattr__(name)
        packed = self._buffers[name + SUFFIX]
        assert packed is not None
        if torch.compiler.is_compiling():
            return SymbolicWeight(packed, *packing)
        head, threads = packing
        return RecurrentWeight.of(packed, threads, head)

    def reset_parameters(self) -> None:
        raise read_only("reset_parameters")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, packed: {', '.join(self.packings)}"


class _SparseLayers(SparseRecurrent, nn.RNNBase):
    """Layers look their flat weights up at each call: nothing is kept that could go stale."""

    @property
    def _flat_weights(self) -> list[Any]:  # type: ignore[override]
        return [getattr(self, name) for name in self._flat_weights_names]

    def _init_flat_weights(self) -> None:
        self._flat_weight_refs = []

    def _weights_have_changed(self) -> bool:
        return False

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Hidden from ``torch.compile`` as torch's own layers are: it would unroll the steps and
        compile anew for each sequence length, which took a minute for 100 steps."""
        forward, dynamo = super().forward, sys.modules.get("torch._dynamo")  # its import is slow
        if dynamo is not None and not dynamo.config.allow_rnn:
            forward = dynamo.disable(forward)
        return forward(input, hx)


class SparseLSTM(_SparseLayers, nn.LSTM):
    """An ``nn.LSTM`` with packed weights."""

    dense_class = nn.LSTM

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):  # what torch checks of other inputs only
            self.check_input(input.data, input.batch_sizes)
            if hx is not None:
                self.check_forward_args(input.data, hx, input.batch_sizes)
        return super().forward(input, hx)


class SparseGRU(_SparseLayers, nn.GRU):
    """An ``nn.GRU`` with packed weights."""

    dense_class = nn.GRU


class SparseRNN(_SparseLayers, nn.RNN):
    """An ``nn.RNN`` with packed weights."""

    dense_class = nn.RNN


class SparseLSTMCell(SparseRecurrent, nn.LSTMCell):
    """An ``nn.LSTMCell`` with packed weights."""

    dense_class = nn.LSTMCell


class SparseGRUCell(SparseRecurrent, nn.GRUCell):
    """An ``nn.GRUCell`` with packed weights."""

    dense_class = nn.GRUCell


class SparseRNNCell(SparseRecurrent, nn.RNNCell):
    """An ``nn.RNNCell`` with packed weights."""

    dense_class = nn.RNNCell


#: The sparse class of each of torch's recurrent modules.
SPARSE_CLASSES: dict[type[nn.Module], type[SparseRecurrent]] = {
    sparse.dense_class: sparse
    for sparse in (
        SparseLSTM,
        SparseGRU,
        SparseRNN,
        SparseLSTMCell,
        SparseGRUCell,
        SparseRNNCell,
    )
}
