"""Capture by ``torch.export``, with sizes left free and everything that it would freeze refused."""

from __future__ import annotations

import dis
import functools
import types
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental import _config as shape_config
from torch.utils import _pytree as pytree

from ..clone import share_clone
from ..errors import CaptureError
from ..verify import Inputs, copies
from .effects import attributes, changes, draws
from .exported_inputs import ExportedInputs, exported_inputs
from .exported_module import ExportedGraphModule
from .graph_module import build
from .region import open_regions
from .trust import foreign_hooks, names_lost
from .watch import Watch

_aten = torch.ops.aten
#: What does nothing to a constant that has the dtype already.
_CONVERSIONS = (_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device)
_SAME = (_aten.alias.default, _aten.detach.default)


def export(own: torch.nn.Module, inputs: Inputs) -> ExportedGraphModule:
    """The graph of ``own``, exported on a scratch copy, over ``own``'s tensors.

    Raises :class:`CaptureError` with the reason where export fails, or where the graph would not do
    what the model does.
    """
    inputs = copies(inputs)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    doubts = [*names_lost(own), *foreign_hooks(own)]
    if not doubts:
        watch, changed = _watched_run(share_clone(own), args, kwargs)
        doubts = [*(f"forward {change}" for change in changed), *_doubts(watch)]
    if doubts:
        raise _refused(own, doubts)
    try:
        with warnings.catch_warnings(), draws() as drawn:
            warnings.simplefilter("ignore")
            program = _program(share_clone(own), args, kwargs)
        autocast = "is_autocast_enabled" not in watch.asked
        takes = exported_inputs(own.forward, args, kwargs, program, autocast)
        result = _graph_module(own, program, takes)
    except Exception as error:
        text = " ".join(str(error).split())[:600]
        raise _refused(own, [f"torch.export fails: {type(error).__name__}: {text}"]) from error
    if drawn:
        raise _refused(own, ["forward draws random numbers outside the graph"])
    return result


def _refused(own: torch.nn.Module, doubts: list[str]) -> CaptureError:
    return CaptureError(
        f"capture='export': {type(own).__name__} cannot be exported as it is: "
        f"{'; '.join(dict.fromkeys(doubts))}. Use capture='auto' or 'modules'"
    )


def _watched_run(
    scratch: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Watch, list[str]]:
    """Runs forward once as it is: export itself cannot be watched, for it takes three times as long
    then, and puts attributes back. Also the attributes that were changed; buffers are not among them,
    they are updated in the graph."""
    given: Any = copies((args, kwargs))
    before, watch = _without_buffers(attributes(scratch)), Watch()
    with torch.random.fork_rng(devices=[]), watch:
        scratch(*given[0], **given[1])
    return watch, changes(before, _without_buffers(attributes(scratch)))


def _without_buffers(state: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in state.items() if not name.endswith("_buffers")}


def _program(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.export.ExportedProgram:
    """Export with all sizes free; where that fails, with sizes of 1 as they are; then as torch does.

    Without ``backed_size_oblivious`` torch takes a free size for 2 or more, and keeps a branch on
    ``x.shape[0] == 1`` without a word; the third attempt has that bound among its guards.
    """
    last: Exception | None = None
    tensors = [
        leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    attempts = [(True, True), (True, False), (False, False)]
    if not any(1 in tensor.shape for tensor in tensors):
        del attempts[1]
    for oblivious, ones in attempts:
        shapes = torch.export.ShapesCollection()
        for tensor in tensors:
            auto = torch.export.Dim.AUTO
            shapes[tensor] = [auto if ones or size != 1 else None for size in tensor.shape]
        free: Any = shapes  # export takes it, its annotation does not say so
        try:
            with (
                cast(Any, shape_config).patch(backed_size_oblivious=oblivious),
                torch.enable_grad(),  # a region without gradients is then seen as one
                torch.autocast("cpu", enabled=False),
            ):
                return torch.export.export(model, args, kwargs, dynamic_shapes=free)
        except Exception as error:
            last = error
    assert last is not None
    raise last


def _doubts(watch: Watch) -> Iterator[str]:
    """What a graph loses of the functions that ran."""
    if watch.blind:
        yield "a profiler runs, so export cannot be watched"
    for mode in sorted(watch.asked - {"is_autocast_enabled"}):
        yield f"forward asks torch.{mode}(), and a graph keeps the answer"
    for code in watch.codes:
        if (name := _written_outside(code)) is not None:
            yield f"{code.co_name} writes the outer variable {name!r}"
    for function in _subclasses(torch.autograd.Function):
        if getattr(function.forward, "__code__", None) in watch.codes:
            yield f"the backward of {function.__name__} (an autograd.Function) would be lost"


@functools.lru_cache(maxsize=4096)
def _written_outside(code: types.CodeType) -> str | None:
    for instruction in dis.get_instructions(code):
        outer = instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars
        if outer or instruction.opname == "STORE_GLOBAL":
            return str(instruction.argval)
    return None


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _graph_module(
    own: torch.nn.Module, program: torch.export.ExportedProgram, takes: ExportedInputs
) -> ExportedGraphModule:
    exported = program.module(check_guards=False)
    assert isinstance(exported, fx.GraphModule)
    open_regions(exported)
    for module in exported.modules():
        if isinstance(module, fx.GraphModule):
            _simplify(module.graph)
    info = exported.graph._codegen.pytree_info  # type: ignore[attr-defined]
    result = build(exported.graph, own, ExportedGraphModule, exported)
    assert isinstance(result, ExportedGraphModule)
    result.hold(takes, info.orig_args, info.out_spec)
    return result


def _simplify(graph: fx.Graph) -> None:
    """Take out what checks or converts constants to no effect, and constants that nothing reads."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _is_constant(source):
            continue
        if node.target is _aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in _CONVERSIONS and _converts_nothing(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
            continue
        # The rest is of export's own making and would hold its fake tensors.
        node.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}


def _is_constant(node: fx.Node) -> bool:
    while node.target in _SAME:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "get_attr"


def _converts_nothing(node: fx.Node, source: fx.Node) -> bool:
    new, old = node.meta["val"], source.meta["val"]
    copies = any(argument is True for argument in (*node.args[2:], *node.kwargs.values()))
    return not copies and (new.dtype, new.device, new.layout) == (old.dtype, old.device, old.layout)
