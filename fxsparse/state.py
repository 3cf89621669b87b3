"""What happens when a module that holds packed weights receives a ``state_dict``."""

from __future__ import annotations

from typing import Any

import torch

from .packing import DTYPES, SUFFIX, Header, header, pack, validate


def packed_names(module: torch.nn.Module) -> list[str]:
    """Names of the packed weights that ``module`` holds itself."""
    return [
        name
        for name, buffer in module._buffers.items()
        if name.endswith(SUFFIX) and buffer is not None and buffer.dtype == torch.uint8
    ]


def guard_packed(module: torch.nn.Module) -> None:
    """Have every packed weight that ``module`` receives checked, resized or made from a dense one."""
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is receive for hook in hooks):
        module.register_load_state_dict_pre_hook(receive)


def receive(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """A load_state_dict pre-hook: a packed weight is validated before it is trusted.

    Another number of nonzeros resizes the buffer (in place, so that ties hold). A dense weight
    under the packed weight's dense name is packed. Refusals go to ``error_msgs``; the buffer then
    stays as it was.
    """
    for name in packed_names(module):
        key, dense_key = prefix + name, prefix + name.removesuffix(SUFFIX)
        own = module._buffers[name]
        assert own is not None
        try:
            new = _incoming(own, key, dense_key, state_dict)
        except ValueError as error:
            error_msgs.append(str(error))
            state_dict[key] = own
            state_dict.pop(dense_key, None)
            continue
        if new is not None:
            state_dict[key] = new
            if own.numel() != new.numel():
                own.resize_(new.numel())


def _incoming(
    own: torch.Tensor, key: str, dense_key: str, state_dict: dict[str, Any]
) -> torch.Tensor | None:
    """The packed weight that ``state_dict`` brings for ``own``, checked; None where it brings none."""
    if own.is_meta:
        raise ValueError(
            f"{key}: the module is on the meta device: call to_empty(device='cpu') first"
        )
    expected = header(own)
    if key in state_dict:
        new = state_dict[key]
        try:
            got = validate(new)
        except ValueError as error:
            raise ValueError(f"{key} is not a valid packed weight: {error}") from error
    elif dense_key in state_dict:
        new, got = _from_dense(state_dict.pop(dense_key), expected, dense_key)
    else:
        return None
    if (got.shape, got.dtype, got.transposed) != (
        expected.shape,
        expected.dtype,
        expected.transposed,
    ):
        raise ValueError(f"{key}: expected {_describe(expected)}, got {_describe(got)}")
    return new


def _from_dense(weight: torch.Tensor, expected: Header, key: str) -> tuple[torch.Tensor, Header]:
    shape = expected.shape[::-1] if expected.transposed else expected.shape
    if tuple(weight.shape) != shape or weight.dtype not in DTYPES:
        raise ValueError(
            f"{key}: expected a dense weight of {shape}, got {tuple(weight.shape)} {weight.dtype}"
        )
    weight = weight.to("cpu", expected.dtype)
    packed = pack(weight, transposed=expected.transposed, is_buffer=expected.is_buffer)
    if packed.numel() >= weight.numel() * weight.element_size():
        raise ValueError(
            f"{key}: this dense weight would not shrink ({packed.numel()} bytes packed, "
            f"{weight.numel() * weight.element_size()} dense): load it into the dense model and compile again"
        )
    return packed, header(packed)


def _describe(head: Header) -> str:
    return f"a packed weight of {head.shape} {head.dtype}" + (
        " (transposed)" if head.transposed else ""
    )
