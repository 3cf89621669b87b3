"""What happens when a module that holds packed weights receives a ``state_dict``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..packing import DTYPES, SUFFIX, Header, header, is_packed, pack, validate
from ..stand_in.weight_view import WeightView


def packed_names(module: torch.nn.Module) -> list[str]:
    """Names of the packed weights that ``module`` holds itself."""
    return [
        name
        for name, buffer in module._buffers.items()
        if name.endswith(SUFFIX) and buffer is not None and is_packed(buffer)
    ]


def guard_packed(module: torch.nn.Module) -> None:
    """Have every packed weight that ``module`` receives checked, resized or made from a dense one."""
    if not _guards(module):
        module.register_load_state_dict_pre_hook(receive)
        module.register_load_state_dict_post_hook(refresh_views)


def release_packed(module: torch.nn.Module) -> None:
    """Take back :func:`guard_packed`."""
    for key in _guards(module):
        del module._load_state_dict_pre_hooks[key]
    for key, hook in list(module._load_state_dict_post_hooks.items()):
        if hook is refresh_views:
            del module._load_state_dict_post_hooks[key]


def _guards(module: torch.nn.Module) -> list[int]:
    hooks = module._load_state_dict_pre_hooks.items()
    return [key for key, hook in hooks if getattr(hook, "hook", None) is receive]


def refresh_views(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """A load_state_dict post-hook: with ``assign=True`` the buffer is another tensor than before."""
    for name in packed_names(module):
        view = module.__dict__.get(name.removesuffix(SUFFIX))
        if isinstance(view, WeightView):
            module.__dict__[name.removesuffix(SUFFIX)] = view.over(module._buffers[name])  # type: ignore[arg-type]


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
    under the packed weight's dense name is packed, with a pruning mask or without. Refusals go to
    ``error_msgs``; the buffer then stays as it was.
    """
    for name, own in list(module._buffers.items()):
        if not name.endswith(SUFFIX) or own is None or own.dtype != torch.uint8:
            continue
        key, dense_key = prefix + name, prefix + name.removesuffix(SUFFIX)
        _fold_mask(state_dict, dense_key)
        try:
            new = _incoming(own, key, dense_key, state_dict)
        except ValueError as error:
            error_msgs.append(str(error))
            state_dict[key] = own
            state_dict.pop(dense_key, None)
            continue
        if new is None:
            continue
        state_dict[key] = new
        if own.numel() != new.numel():
            own.resize_(new.numel())
        if not own.is_meta:
            own.copy_(new)  # now: a second name of this buffer reads its header next


def _fold_mask(state_dict: dict[str, Any], key: str) -> None:
    """A weight that comes with a pruning mask (``weight_orig``, ``weight_mask``) comes as a product."""
    original, mask = state_dict.get(key + "_orig"), state_dict.get(key + "_mask")
    if original is not None and mask is not None and key not in state_dict:
        state_dict[key] = state_dict.pop(key + "_orig") * state_dict.pop(key + "_mask")


def _incoming(
    own: torch.Tensor, key: str, dense_key: str, state_dict: dict[str, Any]
) -> torch.Tensor | None:
    """The packed weight that ``state_dict`` brings for ``own``, checked; None where it brings none.

    A buffer without values yet (on the meta device, or from ``to_empty``) takes any.
    """
    expected = None
    if is_packed(own):
        with contextlib.suppress(
            ValueError
        ):  # after to_empty the memory may hold a part of another
            expected = header(own)
    if key in state_dict:
        new = state_dict[key]
        try:
            got = validate(new)
        except ValueError as error:
            raise ValueError(f"{key} is not a valid packed weight: {error}") from error
    elif dense_key in state_dict:
        if expected is None:
            raise ValueError(
                f"{dense_key}: a dense weight cannot be packed into a module that holds no packed "
                "weight yet: load the compiled module's own state_dict"
            )
        new, got = _from_dense(state_dict.pop(dense_key), expected, dense_key)
    else:
        return None
    if expected is not None and (got.dense_shape, got.dtype, got.transposed, got.blocks) != (
        expected.dense_shape,
        expected.dtype,
        expected.transposed,
        expected.blocks,
    ):
        raise ValueError(f"{key}: expected {_describe(expected)}, got {_describe(got)}")
    return new


def _from_dense(weight: torch.Tensor, expected: Header, key: str) -> tuple[torch.Tensor, Header]:
    shape = expected.dense_shape
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"{key}: expected a tensor, got {type(weight).__name__}")
    if tuple(weight.shape) != shape or weight.dtype not in DTYPES:
        raise ValueError(
            f"{key}: expected a dense weight of {shape}, got {tuple(weight.shape)} {weight.dtype}"
        )
    weight = weight.to("cpu", expected.dtype)
    packed = pack(
        weight,
        format=expected.format,
        transposed=expected.transposed,
        is_buffer=expected.is_buffer,
        blocks=expected.blocks,
    )
    if packed.numel() >= weight.numel() * weight.element_size():
        raise ValueError(
            f"{key}: this dense weight would not shrink ({packed.numel()} bytes packed, "
            f"{weight.numel() * weight.element_size()} dense): load it into the dense model and compile again"
        )
    return packed, header(packed)


def _describe(head: Header) -> str:
    parts = f" in {head.blocks} blocks" if head.blocks else ""
    transposed = " (transposed)" if head.transposed else ""
    return f"a packed weight of {head.dense_shape} {head.dtype}{parts}{transposed}"
