"""The GraphModule that a traced model becomes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _deserialize_graph_module, _forward_from_src

from .state import guard_packed, packed_names

Transient = list[tuple[str, str]]


class SparseGraphModule(fx.GraphModule):
    """A GraphModule whose non-persistent buffers stay so through ``deepcopy`` and pickling.

    ``fx.GraphModule`` makes every buffer persistent on the way, and the ``state_dict`` of a copy
    would have keys that the model never had.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseGraphModule:
        result: Any = super().__deepcopy__(memo)
        _set_transient(result, _transient(self))
        _guard(result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        return _rebuild, (body, imports, _transient(self))


def _rebuild(body: dict[str, Any], imports: str, transient: Transient) -> torch.nn.Module:
    forward = _forward_from_src(imports + (body.get("_code") or body["code"]), {})
    result = _deserialize_graph_module(forward, body, SparseGraphModule)
    _set_transient(result, transient)
    _guard(result)
    return result


def _guard(root: torch.nn.Module) -> None:
    for module in root.modules():
        if packed_names(module):
            guard_packed(module)


def _transient(root: torch.nn.Module) -> Transient:
    return [
        (path, name)
        for path, module in root.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    ]


def _set_transient(root: torch.nn.Module, transient: Transient) -> None:
    for path, name in transient:
        root.get_submodule(path)._non_persistent_buffers_set.add(name)
