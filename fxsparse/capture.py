"""Capture: from a module to the representation that the passes rewrite.

The ladder of ``capture="auto"``: a graph of the whole model where a trace can be trusted, otherwise
the model's own class, whose modules are treated one by one. Then a submodule that multiplies by
parameters of its own is traced by itself, if that trace can be trusted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .clone import share_clone
from .errors import CaptureError
from .graph_module import SparseGraphModule
from .tracer import WatchedTracer

_OPTIONAL = "has optional or keyword arguments"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Captured:
    """What the passes work on.

    ``root`` becomes the result. ``trees`` are the module trees whose weights are replaced: the
    result's, and the model's own where it is rewritten in place. ``note`` says why the model was
    not traced as a whole.
    """

    root: torch.nn.Module
    trees: list[torch.nn.Module] = field(default_factory=list)
    note: str | None = None


def capture(
    own: torch.nn.Module,
    how: str,
    inplace: bool,
    equals_model: Callable[[torch.nn.Module], bool] | None = None,
) -> Captured:
    """Capture a model by ``"auto"``, ``"trace"`` or ``"modules"``.

    ``own`` is the tree to work on: the model itself where it is rewritten ``inplace``, a copy
    otherwise. ``equals_model`` runs a candidate on the example inputs; where given, it decides on
    traces that only their optional arguments put in doubt. ``own`` is never run here, and changed
    only by ``"modules"``, which may replace submodules by graphs of them.
    """
    doubts: list[str] = []
    if how != "modules":
        traced, doubts = trace(own)
        if traced is not None and doubts == [f"forward {_OPTIONAL}"] and equals_model is not None:
            doubts = [] if equals_model(traced) else ["the trace differs on example_inputs"]
        if how == "auto" and callable(getattr(own, "generate", None)):
            doubts.append("the model has generate(), which a graph would lose")
        if traced is not None and not doubts:
            return Captured(traced, [traced, own] if inplace else [traced])
        if how == "trace":
            raise CaptureError(
                f"capture='trace': the trace of {type(own).__name__} cannot be trusted: "
                f"{'; '.join(doubts)}. Use capture='auto' or 'modules'"
                + (", or give example_inputs" if doubts == [f"forward {_OPTIONAL}"] else "")
            )
    _trace_parts(own)
    return Captured(own, [own], "; ".join(doubts) or None)


def trace(model: torch.nn.Module) -> tuple[fx.GraphModule | None, list[str]]:
    """Trace ``model`` on a scratch copy; the graph module gets ``model``'s own modules and tensors.

    Returns the graph module (None where tracing fails) and the reasons to distrust it.
    """
    doubts = _doubts_before(model)
    scratch = share_clone(model)
    before = _attributes(scratch)
    try:
        with torch.random.fork_rng(devices=[]):
            graph, tracer = _trace_once(scratch)
            after = _attributes(scratch)
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            if changed:
                return None, [f"forward changes {', '.join(map(repr, changed[:3]))}"]
            for module in scratch.modules():
                module.training = not module.training
            other, other_tracer = _trace_once(scratch)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:200].replace("'WatchedProxy'", "a traced")
        return None, [f"symbolic_trace fails: {type(error).__name__}: {text}"]
    doubts += tracer.doubts
    if not _same(graph, tracer, other, other_tracer):
        doubts.append("forward depends on the training flag, on random numbers or on state")
    return _graph_module(graph, model, scratch), doubts


def _doubts_before(model: torch.nn.Module) -> list[str]:
    doubts = []
    parameters = inspect.signature(type(model).forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind not in plain or p.default is not inspect.Parameter.empty for p in parameters):
        doubts.append(f"forward {_OPTIONAL}")
    if "forward" in model.__dict__ or type(model).__call__ is not torch.nn.Module.__call__:
        doubts.append("forward or __call__ is replaced on the object")
    tracer = WatchedTracer()
    for name, module in model.named_modules():
        is_leaf = name and tracer.is_leaf_module(module, name)
        if not is_leaf and any(getattr(module, hooks) for hooks in _HOOKS):
            doubts.append(f"{name or 'the model'} has forward or backward hooks")
    return doubts


def _trace_once(root: torch.nn.Module) -> tuple[fx.Graph, WatchedTracer]:
    tracer = WatchedTracer()
    return tracer.trace(root), tracer


def _same(a: fx.Graph, a_tracer: WatchedTracer, b: fx.Graph, b_tracer: WatchedTracer) -> bool:
    """Whether two traces of one module agree node by node, constants included."""

    def form(graph: fx.Graph, root: torch.nn.Module) -> list[Any]:
        place = {node: i for i, node in enumerate(graph.nodes)}

        def constant(node: fx.Node) -> Any:
            if node.op != "get_attr" or "_tensor_constant" not in str(node.target):
                return node.target
            value = _resolve(root, str(node.target))
            return (value.dtype, tuple(value.shape), value.tolist())

        return [
            (node.op, constant(node), fx.node.map_arg((node.args, node.kwargs), lambda n: place[n]))
            for node in graph.nodes
        ]

    return repr(form(a, a_tracer.root)) == repr(form(b, b_tracer.root))


def _attributes(root: torch.nn.Module) -> dict[str, int]:
    """A hash of the identity of every attribute of every module, one level into containers."""

    def identity(value: Any) -> Any:
        if isinstance(value, dict):
            return (
                id(value),
                *((k if isinstance(k, str) else id(k), id(v)) for k, v in value.items()),
            )
        if isinstance(value, (list, tuple, set)):
            return (id(value), *map(id, value))
        if isinstance(value, torch.Tensor):
            return id(value), value._version
        return value if isinstance(value, (int, float, str, bool)) else id(value)

    return {
        f"{name}.{key}".lstrip("."): hash(identity(value))
        for name, module in root.named_modules()
        for key, value in module.__dict__.items()
        if key != "training" and not key.startswith("_tensor_constant") and not _is_empty(value)
    }


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (dict, list, set)) and not value)


def _resolve(root: torch.nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _graph_module(
    graph: fx.Graph, own: torch.nn.Module, scratch: torch.nn.Module
) -> fx.GraphModule:
    """A GraphModule over ``own``'s modules and tensors that keeps every parameter and buffer of it.

    What forward does not use stays too: the state_dict's keys are the model's.
    """
    attributes: dict[str, Any] = {}
    constants = []
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            path = str(node.target)
            try:
                attributes[path] = _resolve(own, path)
            except AttributeError:
                attributes[path] = _resolve(scratch, path)
                constants.append(path)
    traced = SparseGraphModule(attributes, graph, type(own).__name__)
    traced.training = own.training
    registered = dict(own.named_buffers(remove_duplicate=False))
    for path, _ in list(traced.named_buffers(remove_duplicate=False)):
        if path not in registered:
            constants.append(path)
    for path, tensor in [*own.named_parameters(remove_duplicate=False), *registered.items()]:
        _place(traced, own, path, tensor)
    for path in set(constants):
        owner, _, last = path.rpartition(".")
        module = traced.get_submodule(owner)
        if last in module._buffers and path not in registered:
            module._non_persistent_buffers_set.add(last)
    return traced


def _place(traced: fx.GraphModule, own: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Register ``tensor`` at ``path`` as ``own`` does, over plain modules made where none is."""
    *names, last = path.split(".")
    module: torch.nn.Module = traced
    source = own
    for name in names:
        source = source._modules[name]  # type: ignore[assignment]
        if name not in module._modules:
            module.add_module(name, torch.nn.Module().train(source.training))
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


def _trace_parts(root: torch.nn.Module) -> None:
    """Replace submodules that own matrices by their graphs, where those can be trusted.

    Only modules that nobody can tell from their graph are replaced: no hooks, no public methods or
    non-parameter tensors of their own. The rest stay, and the report says so.
    """
    for name, module in list(root.named_modules()):
        if not name or not _owns_matrices(module) or not _is_only_forward(module):
            continue
        try:
            traced, doubts = trace(module)
        except CaptureError:
            continue
        if traced is None or doubts:
            continue
        for key, value in module.__dict__.items():
            if not key.startswith("_") and key not in traced.__dict__:
                setattr(traced, key, value)
        for parent in list(root.modules()):
            for child_name, child in parent._modules.items():
                if child is module:
                    parent._modules[child_name] = traced


def _owns_matrices(module: torch.nn.Module) -> bool:
    if type(module).__module__.startswith("torch.") or isinstance(module, fx.GraphModule):
        return False
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(t is not None and t.dim() == 2 and t.is_floating_point() for t in tensors)


def _is_only_forward(module: torch.nn.Module) -> bool:
    """Whether ``forward`` is the only thing its class offers beyond ``nn.Module``."""
    allowed = {"forward", "extra_repr", "reset_parameters"}
    for cls in type(module).__mro__:
        if cls is torch.nn.Module:
            return True
        public = (
            name
            for name, value in vars(cls).items()
            if callable(value) or isinstance(value, property)
        )
        if any(not name.startswith("_") and name not in allowed for name in public):
            return False
    return False
