"""The GraphModule that a traced model becomes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.graph import PythonCode
from torch.fx.graph_module import _deserialize_graph_module, _forward_from_src

from ..modules.state import guard_packed, packed_names
from .quick import quick_forward

Transient = list[tuple[str, str]]


class SparseGraphModule(fx.GraphModule):
    """A GraphModule whose non-persistent buffers stay so through ``deepcopy`` and pickling.

    ``fx.GraphModule`` makes every buffer persistent on the way, and the ``state_dict`` of a copy
    would have keys that the model never had.

    What runs is :func:`quick_forward`; ``code`` is what ``fx`` writes.
    """

    def recompile(self) -> PythonCode:
        code = super().recompile()
        cls: Any = type(self)
        cls.forward = quick_forward(self, self._graph, cls.forward)
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseGraphModule:
        result: Any = super().__deepcopy__(memo)
        restore(result, transient_buffers(self))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        return _rebuild, (body, imports, transient_buffers(self))


def _rebuild(body: dict[str, Any], imports: str, transient: Transient) -> torch.nn.Module:
    forward = _forward_from_src(imports + (body.get("_code") or body["code"]), {})
    result = _deserialize_graph_module(forward, body, SparseGraphModule)
    restore(result, transient)
    return result


def restore(result: torch.nn.Module, transient: Transient) -> None:
    """Put back what ``fx`` loses of a module in copying or pickling it."""
    _set_transient(result, transient)
    _guard(result)


def _guard(root: torch.nn.Module) -> None:
    for module in root.modules():
        if packed_names(module):
            guard_packed(module)


def transient_buffers(root: torch.nn.Module) -> Transient:
    return [
        (path, name)
        for path, module in root.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    ]


def _set_transient(root: torch.nn.Module, transient: Transient) -> None:
    for path, name in transient:
        root.get_submodule(path)._non_persistent_buffers_set.add(name)


def resolve(root: torch.nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def build(
    graph: fx.Graph,
    own: torch.nn.Module,
    cls: type[SparseGraphModule] = SparseGraphModule,
    others: torch.nn.Module | None = None,
) -> SparseGraphModule:
    """A GraphModule over ``own``'s modules and tensors that keeps every parameter and buffer of it.

    What forward does not use stays too: the state_dict's keys are the model's. What ``own`` has not
    comes from ``others``; tensors among it are constants, no part of the state_dict.
    """
    targets = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    constants = {path for path in targets if others is not None and not _registered(own, path)}
    attributes = {
        path: resolve(others if others is not None and path in constants else own, path)
        for path in targets
    }
    result = cls(attributes, graph, type(own).__name__)
    for path, tensor in [
        *own.named_parameters(remove_duplicate=False),
        *own.named_buffers(remove_duplicate=False),
    ]:
        _place(result, own, path, tensor)
    for path in constants:
        parent, _, name = path.rpartition(".")
        if name in (module := result.get_submodule(parent))._buffers:
            module._non_persistent_buffers_set.add(name)
    flags = {path: module.training for path, module in own.named_modules(remove_duplicate=False)}
    for path, module in result.named_modules():
        module.training = flags.get(path, own.training)
    return result


def _registered(root: torch.nn.Module, path: str) -> bool:
    """Whether a module, parameter or buffer of ``root`` stands at ``path``."""
    parent, _, name = path.rpartition(".")
    try:
        module = root.get_submodule(parent)
    except AttributeError:
        return False
    return any(name in held for held in (module._modules, module._parameters, module._buffers))


def _place(traced: fx.GraphModule, own: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Register ``tensor`` at ``path`` as ``own`` does, over plain modules made where none is."""
    *names, last = path.split(".")
    module: torch.nn.Module = traced
    source = own
    for name in names:
        source = source._modules[name]  # type: ignore[assignment]
        if name not in module._modules:
            module.add_module(name, torch.nn.Module())
        module = module._modules[name]  # type: ignore[assignment]
    if module is source:
        return
    if last in source._parameters:
        module._buffers.pop(last, None)
        module._parameters[last] = tensor  # type: ignore[assignment]
    else:
        module.register_buffer(
            last, tensor, persistent=last not in source._non_persistent_buffers_set
        )
