"""What speaks against tracing a model, found before it is run."""

from __future__ import annotations

import inspect
import keyword

import torch
from torch import fx
from torch.nn.modules import module as torch_module

from ..modules import HOOKS, STATE_HOOKS
from .audit import objection
from .tracer import WatchedTracer
from .watch import arguments, enumerations, needs_audit

#: The one doubt that example inputs can lift.
OPTIONAL = "forward has optional or keyword arguments"

GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)

# What a class may define of nn.Module's own names without a graph losing it.
_OVERRIDES = frozenset(["forward", "extra_repr", "reset_parameters"])


def doubts_before_tracing(model: torch.nn.Module, method: str = "forward") -> list[str]:
    """Why a trace of ``model``, or of one method of it, would not stand for it: signature, hooks,
    overrides, names, source."""
    doubts = []
    parameters = inspect.signature(getattr(type(model), method)).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind not in plain or p.default is not inspect.Parameter.empty for p in parameters):
        doubts.append(OPTIONAL)
    doubts += names_lost(model, method)
    if any(getattr(torch_module, hooks, None) for hooks in GLOBAL_HOOKS):
        doubts.append("global module hooks are registered")
    is_leaf = WatchedTracer().is_leaf_module
    for path, module in model.named_modules():
        where = path or "the model"
        if any(getattr(module, hooks, None) for hooks in (*HOOKS, *STATE_HOOKS)):
            doubts.append(f"{where} has hooks")
        for name, value in module.__dict__.items():
            if hasattr(type(value), "__next__"):
                doubts.append(f"{name!r} of {where} is an iterator")
        if isinstance(module, torch.jit.ScriptModule):
            doubts.append(f"{where} is compiled by torch.jit")
            continue
        if not path or not is_leaf(module, path):
            doubts += _doubts_of_class(module, where, "" if path else method)
    return doubts


def names_lost(model: torch.nn.Module, method: str = "forward") -> list[str]:
    """Names that cannot stand in the code of a graph or on a GraphModule."""
    doubts = []
    if "torch" in inspect.signature(getattr(type(model), method)).parameters:
        doubts.append(f"{method} has an argument named 'torch'")
    for name in [*model._modules, *model._parameters, *model._buffers]:
        if hasattr(fx.GraphModule, name) or name in ("graph", "meta"):
            doubts.append(f"a GraphModule has an attribute {name!r} of its own")
    for path, module in model.named_modules():
        if any(keyword.iskeyword(name) for name, _ in module.named_children()):
            doubts.append(f"{path or 'the model'} has a child named by a keyword")
    return doubts


def foreign_hooks(model: torch.nn.Module) -> list[str]:
    """Hooks that are not torch's own: what they do beside the graph would be done once."""
    doubts = []
    if any(getattr(torch_module, hooks, None) for hooks in GLOBAL_HOOKS):
        doubts.append("global module hooks are registered")
    for path, module in model.named_modules():
        hooks = [hook for kind in (*HOOKS, *STATE_HOOKS) for hook in getattr(module, kind).values()]
        if any(not _module_of(getattr(hook, "hook", hook)).startswith("torch.") for hook in hooks):
            doubts.append(f"{path or 'the model'} has hooks")
    return doubts


def _module_of(hook: object) -> str:
    return str(getattr(hook, "__module__", type(hook).__module__))


def _doubts_of_class(module: torch.nn.Module, where: str, root_method: str) -> list[str]:
    """What speaks against a trace through ``module``: of ``root_method`` of the root, or where that is
    empty through a child, whatever its arguments may be."""
    doubts = []
    method = root_method or "forward"
    if "forward" in module.__dict__:
        doubts.append(f"forward of {where} is replaced on the object")
    cls = type(module)
    for base in cls.__mro__[: cls.__mro__.index(torch.nn.Module)]:
        if not base.__module__.startswith("torch."):
            kept = _OVERRIDES if method == "forward" else _OVERRIDES | {"__call__"}
            lost = [n for n in vars(base) if n in _MODULE_METHODS and n not in kept]
            if lost:
                doubts.append(f"{base.__name__} overrides {', '.join(lost[:3])}")
    function = getattr(cls, method)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        doubts.append(f"{method} of {cls.__name__} is wrapped")
    elif needs_audit(code):
        known = frozenset(["self"]) if root_method else arguments(code)
        if found := objection(code, known | enumerations(code, function.__globals__)):
            doubts.append(found)
    return doubts


_MODULE_METHODS = frozenset(
    name
    for name, value in vars(torch.nn.Module).items()
    if callable(value) and name not in ("__init__", "__repr__")
)
