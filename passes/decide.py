"""Judges each weight once: packed or dense, and why."""

from __future__ import annotations

import torch

from fxsparse.cost import (
    SPEED_MATTERS,
    STEP_NS,
    Choice,
    break_even_sparsity,
    choose,
    slowest_batch,
    smallest_sparsity,
    speedup,
)
from fxsparse.memory import tensor_bytes
from fxsparse.options import Options, matches
from fxsparse.packing import count_nonzeros, describe, packed_bytes, strided, unreadable

from .kinds import LAYER_NAMES
from .record import Decision, Weight


def decide(weight: Weight, options: Options) -> Decision:
    """The decision for one weight. Reads the weight, changes nothing."""
    tensor = weight.tensor
    assert tensor is not None
    nnz, sparsity = _count(tensor)
    paths = [weight.path, *weight.aliases]
    dense_bytes = tensor_bytes(tensor)
    reason = _excluded(paths, options) or unreadable(tensor) or weight.blocked or _unread(weight)
    stored, headers, format = dense_bytes, None, ""
    if reason is None:
        rows, cols = _matrix_shape(weight, tensor)
        count = weight.blocks or 1
        choice = choose(
            (rows, cols),
            nnz // count,
            tensor.dtype,
            batch_hint=options.batch_hint,
            prefer=options.prefer,
            by_rows=weight.looked_up,
        )
        call_ns = STEP_NS if weight.op in LAYER_NAMES else 0
        reason = _too_dense(tensor, (rows, cols), nnz // count, choice, count, call_ns, options)
        if reason is None:
            headers = describe(
                tensor,
                choice.format,
                transposed=weight.transposed,
                is_buffer=not isinstance(tensor, torch.nn.Parameter),
                blocks=weight.blocks,
            )
            packed = packed_bytes(headers, stacked=weight.blocks > 0)
            if packed < dense_bytes:
                stored, format = packed, choice.format
            else:
                reason, headers = _would_not_shrink(packed, dense_bytes), None
    sparse = reason is None
    return Decision(
        sparse=sparse,
        reason=reason or "",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        sparsity=sparsity,
        nnz=nnz,
        candidate=sparsity >= options.threshold,
        dense_bytes=dense_bytes,
        stored_bytes=stored,
        format=format,
        headers=headers,
        threads=options.threads_for(paths)[0] if sparse else None,
    )


def _matrix_shape(weight: Weight, tensor: torch.Tensor) -> tuple[int, int]:
    """(out, in) of the matrix, or of each of the matrices, that the weight is packed as."""
    if tensor.dim() == 1:
        return 1, len(tensor)
    rows, cols = tensor.shape[-2:] if weight.blocks else tensor.shape[:2]
    if tensor.dim() == 2 and weight.blocks:
        rows //= weight.blocks
    return (cols, rows) if weight.transposed else (rows, cols)


def _excluded(paths: list[str], options: Options) -> str | None:
    for pattern in options.exclude:
        if matches(pattern, paths):
            return f"excluded by the pattern {pattern!r}"
    if options.include is not None and not any(matches(p, paths) for p in options.include):
        return "no include pattern matches it"
    return None


def _unread(weight: Weight) -> str | None:
    return None if weight.sites else "forward does not use it"


def _too_dense(
    tensor: torch.Tensor,
    shape: tuple[int, int],
    nnz: int,
    choice: Choice,
    count: int,
    call_ns: float,
    options: Options,
) -> str | None:
    """Why a weight of ``count`` matrices stays dense that could be packed; None if it is packed."""
    elements = shape[0] * shape[1]
    sparsity = 1 - nnz / elements if elements else 0.0
    if sparsity < options.threshold:
        smaller = smallest_sparsity(shape, tensor.dtype)
        return (
            f"sparsity {_percent(sparsity)} is below the threshold of {_percent(options.threshold)} "
            f"(packed it is smaller from {_percent(smaller)} on)"
        )
    if tensor.numel() < options.min_elements:
        return f"{tensor.numel()} elements are fewer than min_elements={options.min_elements}"
    dense = tensor_bytes(tensor)
    if choice.bytes * count >= dense:
        return _would_not_shrink(choice.bytes * count, dense)
    if options.prefer != "latency":
        return None
    if elements < SPEED_MATTERS:
        return f"prefer='latency': with {elements} elements the call costs more than the multiply"
    batch = options.batch_hint
    if batch is None:
        batch, gain = slowest_batch(shape, nnz, choice.format, call_ns)
    else:
        gain = speedup(shape, nnz, choice.format, batch, call_ns)
    if gain >= 1:
        return None
    even = break_even_sparsity(shape, batch, call_ns)
    return (
        f"prefer='latency': for {batch} rows {gain:.2g} times the speed of dense is expected "
        f"({choice.format}); faster than dense from {_percent(even)} zeros on"
    )


def _would_not_shrink(packed: int, dense: int) -> str:
    return f"packed it would not be smaller: {packed} bytes against {dense}"


def _count(tensor: torch.Tensor) -> tuple[int, float]:
    """Nonzeros and sparsity of a tensor of any dtype, layout and dimension; all nonzero in doubt."""
    if tensor.numel() == 0:
        return 0, 0.0
    tensor = tensor.detach()
    if unreadable(tensor) is None:
        tensor = strided(tensor)
        nnz = count_nonzeros(tensor if tensor.dim() == 2 else tensor.reshape(1, -1))
    else:
        try:
            nnz = int(torch.count_nonzero(tensor.float() if tensor.is_floating_point() else tensor))
        except (NotImplementedError, RuntimeError):
            nnz = tensor.numel()
    return nnz, 1 - nnz / tensor.numel()


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
