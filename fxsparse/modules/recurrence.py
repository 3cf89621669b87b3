"""Torch's recurrent functions (``torch.lstm``, ``torch.gru_cell``, ...) over packed weights.

The formulas, and the order in which they round, are those of torch's own implementation for any
device (``aten/src/ATen/native/RNN.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from .. import ops
from ..packing import Header

States = tuple[torch.Tensor, ...]


class PackedMatrix:
    """A stand-in for a whole packed weight, which the functions here multiply by as it is."""

    packed: torch.Tensor
    head: Header
    threads: int

    def dense(self) -> torch.Tensor:
        """The dense weight, bit for bit."""
        return ops.unpack(self.packed, *self.head.shape, self.head.dtype)


class Weights(NamedTuple):
    """The weights of one direction of one layer, or of a cell."""

    ih: Any
    hh: Any
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None
    hr: Any = None  #: the projection of an LSTM's output


class Kind(NamedTuple):
    """What a family of functions does in one step, from the input's product to the next states."""

    step: Callable[[torch.Tensor, States, Weights, bool], States]
    gates: int
    states: int = 1


def _lstm_step(x: torch.Tensor, states: States, w: Weights, more: bool) -> States:
    hidden, cell = states
    i, f, g, o = (linear(hidden, w.hh, w.b_hh, more) + x).chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return hidden if w.hr is None else linear(hidden, w.hr, None, more), cell


def _gru_step(x: torch.Tensor, states: States, w: Weights, more: bool) -> States:
    (hidden,) = states
    x_r, x_z, x_n = x.chunk(3, 1)
    h_r, h_z, h_n = linear(hidden, w.hh, w.b_hh, more).chunk(3, 1)
    new = (x_n + h_n * (h_r + x_r).sigmoid()).tanh()
    return ((hidden - new) * (h_z + x_z).sigmoid() + new,)


def _tanh_step(x: torch.Tensor, states: States, w: Weights, more: bool) -> States:
    return ((linear(states[0], w.hh, w.b_hh, more) + x).tanh(),)


def _relu_step(x: torch.Tensor, states: States, w: Weights, more: bool) -> States:
    return ((linear(states[0], w.hh, w.b_hh, more) + x).relu(),)


_LSTM, _GRU = Kind(_lstm_step, gates=4, states=2), Kind(_gru_step, gates=3)
_TANH, _RELU = Kind(_tanh_step, gates=1), Kind(_relu_step, gates=1)

_LAYERS = {torch.lstm: _LSTM, torch.gru: _GRU, torch.rnn_tanh: _TANH, torch.rnn_relu: _RELU}
_CELLS = {
    torch.lstm_cell: _LSTM,
    torch.gru_cell: _GRU,
    torch.rnn_tanh_cell: _TANH,
    torch.rnn_relu_cell: _RELU,
}


#: The functions that :func:`recurrent` computes.
FUNCTIONS = frozenset((*_LAYERS, *_CELLS))


def recurrent(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of one of the :data:`FUNCTIONS`.

    A call that is not made as torch's modules make it, or that torch would refuse, goes to torch with
    dense weights: it knows what to say.
    """
    result = NotImplemented
    if not kwargs and func in _CELLS and len(args) == 6:
        result = _cell(_CELLS[func], *args)
    elif not kwargs and func in _LAYERS and len(args) == 9:
        result = _layers(_LAYERS[func], args)
    return func(*dense(args), **dense(kwargs)) if result is NotImplemented else result


def dense(arguments: Any) -> Any:
    """Arguments, nested as they are, with every packed weight unpacked."""
    return tree_map(lambda a: a.dense() if is_packed(a) else a, arguments)


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, more: bool) -> torch.Tensor:
    """``x @ weight.T + bias``; ``more``: another multiply by a packed weight follows soon."""
    if not is_packed(weight):
        return functional.linear(x, weight, bias)
    head = weight.head
    return ops.run_linear(x, weight.packed, bias, *head.shape, head.dtype, weight.threads, more)


def is_packed(weight: Any) -> TypeGuard[PackedMatrix]:
    return isinstance(weight, PackedMatrix)


def _cell(kind: Kind, x: torch.Tensor, hx: Any, *weights: Any) -> Any:
    states, w = _states(hx), Weights(*weights)
    if x.dim() != 2 or not _fits(kind, x, x.shape[0], states, w):
        return NotImplemented
    states = kind.step(linear(x, w.ih, w.b_ih, is_packed(w.hh)), states, w, False)
    return states if kind.states > 1 else states[0]


class _Options(NamedTuple):
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool


def _layers(kind: Kind, args: Sequence[Any]) -> Any:
    """All layers over padded sequences, or over packed ones (``x`` holds the rows of all steps)."""
    is_padded = isinstance(args[3], bool)
    if is_padded:
        x, hx, weights, *rest, batch_first = args
        if x.dim() != 3:
            return NotImplemented
        x = x.transpose(0, 1) if batch_first else x
        steps, batch, features = x.shape
        sizes = [batch] * steps
        x = x.reshape(steps * batch, features)
    else:
        x, batch_sizes, hx, weights, *rest = args
        sizes = batch_sizes.tolist()
    options, states = _Options(*rest), _states(hx)
    groups = _groups(weights, options)
    if not sizes or groups is None or not _all_fit(kind, x, sizes, states, groups, options):
        return NotImplemented
    y, states = _stack(kind, x, sizes, states, groups, options)
    if is_padded:
        y = y.reshape(steps, batch, y.shape[1])
        y = y.transpose(0, 1) if batch_first else y
    results = (y, *states)
    if kind is _LSTM and groups[0].hr is None and sizes[0] == sizes[-1]:
        results = _as_onednn(results, x)
    return results


def _as_onednn(results: States, x: torch.Tensor) -> States:
    """Where torch runs an LSTM in oneDNN, autocast makes all its results the dtype of autocast."""
    is_cast = torch.is_autocast_enabled("cpu") and torch.backends.mkldnn.enabled
    if not is_cast or not x.numel() or x.dtype == torch.float64:
        return results
    return tuple(result.to(torch.get_autocast_dtype("cpu")) for result in results)


def _states(hx: Any) -> States:
    return tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)


def _groups(weights: Sequence[Any], options: _Options) -> list[Weights] | None:
    """Torch's flat list of weights by layer and direction, the directions of a layer together."""
    count = options.num_layers * (2 if options.bidirectional else 1)
    size, rest = divmod(len(weights), count)
    least = 4 if options.has_biases else 2
    if rest or size not in (least, least + 1):
        return None
    groups = [weights[k : k + size] for k in range(0, len(weights), size)]
    if options.has_biases:
        return [Weights(*group) for group in groups]
    return [Weights(ih, hh, None, None, *hr) for ih, hh, *hr in groups]


def _stack(
    kind: Kind,
    x: torch.Tensor,
    sizes: list[int],
    states: States,
    groups: list[Weights],
    options: _Options,
) -> tuple[torch.Tensor, States]:
    """All layers. Returns the last one's output, and the final states as torch stacks them."""
    directions = 2 if options.bidirectional else 1
    finals = []
    for layer in range(options.num_layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            initial = tuple(state[k] for state in states)
            reverse = k % directions == 1
            output, final = _direction(kind, x, sizes, initial, groups[k], reverse)
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, 1) if directions > 1 else outputs[0]
        if options.dropout and options.train and layer < options.num_layers - 1:
            x = functional.dropout(x, options.dropout)
    return x, tuple(torch.stack(final) for final in zip(*finals))


def _direction(
    kind: Kind, x: torch.Tensor, sizes: list[int], initial: States, w: Weights, reverse: bool
) -> tuple[torch.Tensor, States]:
    """One layer in one direction over the rows of all steps, ``sizes[t]`` of them at step t.

    Sizes fall from step to step, longer sequences stand first. Forward, the states of those that
    are over wait in ``ended``; in reverse, longer ones come in with their initial states.
    """
    products = linear(x, w.ih, w.b_ih, is_packed(w.hh)).split(sizes)
    order = range(len(sizes))[:: -1 if reverse else 1]
    states = tuple(state[: sizes[order[0]]] for state in initial)
    outputs, ended = [], []
    for t in order:
        rows, size = states[0].shape[0], sizes[t]
        if size < rows:
            ended.append([state[size:] for state in states])
            states = tuple(state[:size] for state in states)
        elif size > rows:
            pairs = zip(states, initial)
            states = tuple(torch.cat([state, first[rows:size]]) for state, first in pairs)
        states = kind.step(products[t], states, w, is_packed(w.hh) and t != order[-1])
        outputs.append(states[0])
    final = tuple(torch.cat(parts) for parts in zip(states, *reversed(ended))) if ended else states
    return torch.cat(outputs[:: -1 if reverse else 1]), final


def _all_fit(
    kind: Kind,
    x: torch.Tensor,
    sizes: list[int],
    states: States,
    groups: list[Weights],
    options: _Options,
) -> bool:
    if any(state.dim() != 3 or state.shape[0] != len(groups) for state in states):
        return False
    if x.dim() != 2 or sum(sizes) != x.shape[0]:
        return False
    directions = 2 if options.bidirectional else 1
    for k, w in enumerate(groups):
        inputs = x if k < directions else None
        if not _fits(kind, inputs, sizes[0], tuple(state[k] for state in states), w):
            return False
    return True


def _fits(kind: Kind, x: torch.Tensor | None, batch: int, states: States, w: Weights) -> bool:
    """Whether sizes and dtypes are those that the formulas take; ``x`` is not known of every layer."""
    weights: list[Any] = [v.head if is_packed(v) else v for v in w]
    (rows, features), (_, hidden) = weights[0].shape, weights[1].shape
    sizes = [(batch, hidden), (batch, rows // kind.gates)][: kind.states]
    if [state.shape for state in states] != sizes or (x is not None and x.shape[1] != features):
        return False
    dtypes = {v.dtype for v in (x, *states, *weights) if v is not None}
    return len(dtypes) == 1 or torch.is_autocast_enabled("cpu")
