"""Kinds of modules that own weights: which are multiplies we rewrite, and why the others stay."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList

from fxsparse.capture.reads import Reads, how_read
from fxsparse.capture.source import reads_parameters
from fxsparse.modules import (
    HOOKS,
    STATE_HOOKS,
    SparseConv1d,
    SparseConv2d,
    SparseLinear,
    SparseModule,
)
from fxsparse.modules.recurrent import CELL_NAMES, SPARSE_CLASSES, SparseRecurrent

#: Modules whose weights are reported and kept: class, name of the operation, reason.
KEPT: tuple[tuple[type[nn.Module], str, str], ...] = (
    (torch.jit.ScriptModule, "script", "torch.jit has compiled the module that reads it"),
    (nn.Bilinear, "bilinear", "nn.Bilinear is not a plain matrix multiply"),
    (
        nn.modules.conv._ConvNd,
        "conv",
        "only 1x1 convolutions (nn.Conv1d, nn.Conv2d; stride 1, no padding, one group) are rewritten",
    ),
)


#: Recurrent layers, by the name of their operation: they multiply once for each step.
LAYER_NAMES = frozenset(["nn.LSTM", "nn.GRU", "nn.RNN"])

#: Modules of torch, and what takes their place.
REPLACEMENTS: dict[type[nn.Module], type[SparseModule]] = {
    nn.Linear: SparseLinear,
    nn.Conv1d: SparseConv1d,
    nn.Conv2d: SparseConv2d,
}


@dataclass(frozen=True)
class OwnWeight:
    """A weight that a module holds: which operation it serves, and how its forward uses it.

    ``reason`` says why it must stay dense. ``transposed``: ``y = x @ W``; ``lookup``: rows are looked
    up; ``blocks``: it is packed as so many matrices.
    """

    name: str
    op: str
    reason: str | None = None
    transposed: bool = False
    lookup: bool = False
    blocks: int = 0


def replacement(module: nn.Module) -> type[SparseModule] | None:
    """What can take the place of a module that is one of torch's and nothing more: what packing it
    would lose is not there.

    A subclass is somebody's own, as are a replaced forward, further tensors, and a bias of a shape
    that only broadcasts.
    """
    found = REPLACEMENTS.get(type(module))
    if found is None or "forward" in module.__dict__:
        return None
    if any(getattr(module, hooks, None) for hooks in STATE_HOOKS):
        return None
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    is_whole = set(module._parameters) == {"weight", "bias"} and not module._buffers
    if weight is None or not is_whole or module._modules:
        return None
    if isinstance(module, nn.modules.conv._ConvNd):
        fits = _is_1x1(module) and tuple(weight.shape[2:]) == module.kernel_size
    else:
        fits = weight.dim() == 2
    if bias is not None:
        fits &= tuple(bias.shape) == weight.shape[:1] and bias.dtype == weight.dtype
    return found if fits else None


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is one of torch's recurrent layers or cells and nothing more, packed or not."""
    if isinstance(module, SparseRecurrent):
        return True
    if type(module) not in SPARSE_CLASSES or "forward" in module.__dict__:
        return False
    if any(getattr(module, hooks, None) for hooks in STATE_HOOKS):
        return False
    names = getattr(module, "_flat_weights_names", CELL_NAMES)
    return set(module._parameters) == set(names) and not module._buffers and not module._modules


def _is_1x1(conv: nn.modules.conv._ConvNd) -> bool:
    """Whether a convolution multiplies each pixel by a matrix, and that is all."""
    ones = {*conv.kernel_size, *conv.stride, conv.groups} == {1}
    return ones and (isinstance(conv.padding, str) or set(conv.padding) == {0})


def operation(module: nn.Module) -> str:
    """What the report calls the multiply of a module that has a :func:`replacement`."""
    return f"nn.{type(module).__name__}"


def is_plain(module: nn.Module) -> bool:
    """A module with a :func:`replacement` that no hook observes: a node can take its place."""
    return replacement(module) is not None and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in HOOKS)


def forward_reads_parameters(module: nn.Module) -> str | None:
    """Why the weights below a module must stay parameters; None where they need not."""
    kind = type(module)
    if kind.__module__.startswith(("torch.", "fxsparse.")):
        return None
    if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
        return f"{kind.__name__} may pass nested tensors on: set enable_nested_tensor=False"
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None:
        return None
    reads = reads_parameters(code)
    if reads == "first" and any(p.dim() < 2 for p in module.parameters()):
        return None  # one is left to be looked at
    return f"{kind.__name__}.forward goes through its parameters" if reads else None


def module_weights(
    module: nn.Module, held_by: tuple[nn.Module, str] | None = None
) -> list[OwnWeight]:
    """The weights of one module; ``held_by``: its parent and its name there."""
    kind = type(module)
    if replacement(module) is not None:
        return [OwnWeight("weight", operation(module))]
    if isinstance(module, nn.Linear):
        return _linear_weights(module)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return _recurrent_weights(module)
    for cls, op, reason in KEPT:
        if isinstance(module, cls):
            return [OwnWeight(name, op, reason) for name in _matrices(module)]
    if isinstance(module, nn.MultiheadAttention):
        return _attention_weights(module)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return _embedding_weights(module)
    if isinstance(module, ParametrizationList):
        reason = "it is behind a parametrization"
        return [OwnWeight(name, "parametrization", reason) for name in _matrices(module)]
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        if held_by is None or not _runs_its_class(held_by[0]):
            reason = f"it is read from a {kind.__name__} by a forward that was not traced"
            return [OwnWeight(name, "parameter", reason) for name in _matrices(module)]
        reads = how_read(type(held_by[0]), held_by[1])
        return [_read_weight(module, name, kind.__name__, reads) for name in _matrices(module)]
    if kind.__module__.startswith("torch."):
        return []
    matrices = {name: _how_read(module, name) for name in _matrices(module)}
    found = {**matrices, **_multiplied_vectors(module)}
    return [_read_weight(module, name, kind.__name__, reads) for name, reads in found.items()]


def _linear_weights(module: nn.Linear) -> list[OwnWeight]:
    """Of a linear that is more than ``nn.Linear``, or a subclass of it."""
    kind = type(module)
    if module._parameters.get("weight") is None:
        reason = "its weight is recomputed at every call (hook or parametrization), or a buffer"
    elif (
        kind is nn.Linear
        or any(getattr(module, hooks, None) for hooks in STATE_HOOKS)
        or (kind.__module__.startswith("torch.") and kind is not NonDynamicallyQuantizableLinear)
    ):
        reason = f"this {kind.__name__} is more than an nn.Linear"
    else:
        reads = _how_read(module, "weight")
        if isinstance(reads, Reads) and (kind.forward is nn.Linear.forward or reads.calls_super):
            reads = replace(reads, swapped=[*reads.swapped, False])
        own = _read_weight(module, "weight", "nn.Linear", reads)
        rest = [name for name in _matrices(module) if name != "weight"]
        return [
            own,
            *(_read_weight(module, name, "nn.Linear", _how_read(module, name)) for name in rest),
        ]
    return [OwnWeight(name, "nn.Linear", reason) for name in _matrices(module)]


def _recurrent_weights(module: nn.Module) -> list[OwnWeight]:
    kind = type(module)
    base = next((cls for cls in kind.__mro__ if cls in SPARSE_CLASSES), nn.RNNBase).__name__
    reason = None if is_recurrent(module) else f"this {kind.__name__} is more than an nn.{base}"
    return [OwnWeight(name, f"nn.{base}", reason) for name in _matrices(module)]


def _attention_weights(module: nn.MultiheadAttention) -> list[OwnWeight]:
    """The projections of ``nn.MultiheadAttention``: of q, k and v, stacked or apart. The fourth is a
    child."""
    reason = None
    if type(module).forward is not nn.MultiheadAttention.forward or "forward" in module.__dict__:
        reason = f"this {type(module).__name__} is more than an nn.MultiheadAttention"
    return [
        OwnWeight(name, "attention", reason, blocks=3 if name == "in_proj_weight" else 0)
        for name in _matrices(module)
        if name.endswith("proj_weight")
    ]


def _embedding_weights(module: nn.Embedding | nn.EmbeddingBag) -> list[OwnWeight]:
    kind = type(module)
    op = f"nn.{'Embedding' if isinstance(module, nn.Embedding) else 'EmbeddingBag'}"
    reads = _how_read(module, "weight") if not kind.__module__.startswith("torch.") else Reads()
    reason = reads if isinstance(reads, str) else None
    if module.max_norm is not None:
        reason = "max_norm writes to it"
    if isinstance(module, nn.EmbeddingBag) and (
        module.padding_idx is not None or module.mode == "max"
    ):
        reason = "an nn.EmbeddingBag with padding_idx or mode='max' reads it"
    return [OwnWeight("weight", op, reason, lookup=True)]


def _how_read(module: nn.Module, name: str) -> Reads | str:
    if not _runs_its_class(module):
        return f"forward of this {type(module).__name__} is replaced on the object"
    return how_read(type(module), name)


def _runs_its_class(module: nn.Module) -> bool:
    return "forward" not in module.__dict__


def _read_weight(module: nn.Module, name: str, op: str, reads: Reads | str) -> OwnWeight:
    """A weight that a forward which was not traced reads as ``reads`` says."""
    kind = type(module).__name__
    if isinstance(reads, str):
        return OwnWeight(name, op, f"its forward was not traced, and {reads}")
    if reads.looked_up and not reads.swapped:
        return OwnWeight(name, op, lookup=True)
    if not reads.swapped:
        reason = f"{kind}.forward was not traced, so how it reads this weight is not known"
        return OwnWeight(name, op, reason)
    tensor = getattr(module, name)
    if tensor.dim() > 3:
        return OwnWeight(name, op, f"it has {tensor.dim()} dimensions")
    if tensor.dim() == 2 and reads.sliced and not isinstance(module, nn.ParameterList):
        return OwnWeight(name, op, f"{kind}.forward takes parts of it")
    blocks = tensor.shape[0] if tensor.dim() == 3 else reads.blocks(module)
    if tensor.shape[0] % (blocks or 1) or tensor.numel() == 0 or tensor.dim() == 1:
        blocks = 0
    transposed = tensor.dim() > 1 and sum(reads.swapped) * 2 > len(reads.swapped)
    return OwnWeight(name, op, transposed=transposed, blocks=blocks)


def _multiplied_vectors(module: nn.Module) -> dict[str, Reads]:
    """Vectors that forward multiplies matrices by, such as a learned query, and how it reads them:
    most are added or scale."""
    vectors = [n for n, p in module._parameters.items() if p is not None and p.dim() == 1]
    reads = {name: _how_read(module, name) for name in vectors}
    return {n: found for n, found in reads.items() if isinstance(found, Reads) and found.swapped}


def _matrices(module: nn.Module) -> list[str]:
    tensors: dict[str, torch.Tensor | None] = {**module._parameters}
    if isinstance(module, nn.Linear):
        tensors.update(module._buffers)
    return [name for name, t in tensors.items() if t is not None and t.dim() >= 2]
