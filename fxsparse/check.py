"""What ``compile`` accepts: wrappers are taken off, the rest is one clear error."""

from __future__ import annotations

import sys

import torch

from .state import packed_names


def unwrap(model: object) -> torch.nn.Module:
    """The module inside DataParallel, DistributedDataParallel and ``torch.compile`` wrappers."""
    wrappers: list[type] = [torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel]
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # its import takes a second
    if dynamo is not None:
        wrappers.append(dynamo.OptimizedModule)
    while isinstance(model, tuple(wrappers)):
        model = getattr(model, "_orig_mod", None) or getattr(model, "module")  # noqa: B009
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"expected a Python nn.Module, got a {type(model).__name__}: compile the model before it is "
            "scripted or traced by torch.jit"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(model).__name__}")
    return model


def check_model(model: torch.nn.Module) -> None:
    """Raise a ``ValueError`` for a model whose weights are not plain tensors with values on the CPU."""
    registered = {*model._modules, *model._parameters, *model._buffers}
    if hasattr(type(model), "report") or "report" in registered:
        raise ValueError(
            f"{type(model).__name__} has an attribute 'report' of its own, where the rewrite report "
            "would stand: rename it"
        )
    for path, module in model.named_modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "FSDPModule"):
            raise ValueError(
                f"{path or 'the model'} is sharded (FSDP): gather the full model first"
            )
        if names := packed_names(module):
            raise ValueError(
                f"{f'{path}.{names[0]}'.lstrip('.')} is packed already: expected a dense model; "
                "pass the original, or fxsparse.to_dense(module)"
            )
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"{path} has no shape yet (a lazy module): run the model once first")
        if type(tensor).__name__ == "DTensor":
            raise ValueError(f"{path} is sharded (a DTensor): gather the full model first")
        if tensor.is_meta:
            raise ValueError(
                f"{path} is on the meta device and has no values: load the weights first"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{path} is on {tensor.device}: expected a model on the CPU; call model.cpu() first"
            )
