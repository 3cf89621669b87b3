"""What ``compile`` accepts: wrappers are taken off, the rest is one clear error."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .modules import HOOKS
from .modules.state import packed_names


def unwrap(model: object) -> torch.nn.Module:
    """The module inside DataParallel, DistributedDataParallel and ``torch.compile`` wrappers."""
    while _is_wrapper(model):
        _check_hooks("the model", model)
        model = _inside(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"expected a Python nn.Module, got a {type(model).__name__}: compile the model before it is "
            "scripted or traced by torch.jit"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(model).__name__}")
    return model


def unwrap_children(model: torch.nn.Module) -> None:
    """Take the same wrappers off below ``model``, in place."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            while _is_wrapper(child):
                module._modules[name] = child = _inside(child)


def _is_wrapper(module: object) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # its import takes a second
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    return isinstance(module, parallel if dynamo is None else (*parallel, dynamo.OptimizedModule))


def _inside(wrapper: Any) -> Any:
    return wrapper._modules.get("_orig_mod", wrapper._modules.get("module"))


def _check_hooks(path: str, wrapper: Any) -> None:
    if any(getattr(wrapper, hooks) for hooks in HOOKS):
        raise ValueError(
            f"{path} is wrapped in {type(wrapper).__name__}, which has hooks of its own: they would be "
            "lost with the wrapper; register them on the module inside"
        )


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
        if _is_wrapper(module):
            _check_hooks(path, module)
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
