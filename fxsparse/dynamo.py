"""``torch.compile(model, backend="fxsparse")``: the rewrite as a Dynamo backend.

Saves time, not memory: the model keeps its dense weights, and packed ones stand beside them, one for
each weight whatever the number of recompiles. A weight that changes is packed again at the next call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends import registry
from torch.utils.weak import WeakTensorKeyDictionary

from .capture.graph_module import SparseGraphModule
from .memory import tensor_bytes
from .options import Options
from .packing import SUFFIX, describe, pack, packed_bytes, unreadable
from .passes.collect import collect
from .passes.decide import decide
from .passes.record import Decision, Weight
from .passes.rewrite import mark
from .passes.schedule import rewrite
from .stand_in.weight_view import stand_in

#: Options of ``fxsparse.compile`` that have a meaning here; weights have no paths in a Dynamo graph.
OPTIONS = ("threshold", "min_elements", "batch_hint", "threads", "prefer")


def backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's: multiplies by sparse weights become calls of the operator.

    ``options`` (of ``torch.compile``) are those of :func:`fxsparse.compile` named in ``OPTIONS``.
    Weights that require gradients are used as they are wherever gradients are on.
    """
    unknown = sorted(set(options or ()) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"backend='fxsparse': expected the options {', '.join(OPTIONS)}, got {', '.join(unknown)}"
        )
    checked = Options.checked(**dict(options or {}))
    if isinstance(checked.threads, Mapping):
        raise ValueError("backend='fxsparse': expected one number of threads, got a mapping")
    grad = torch.is_grad_enabled()
    with torch.no_grad():
        sparse, packed, training = _rewritten(graph_module, example_inputs, checked, grad)
    if training:
        warnings.warn(
            f"backend='fxsparse': gradients are on and {training} sparse weights require them, so these "
            "stay dense: call the model under torch.no_grad(), or freeze it with requires_grad_(False)",
            stacklevel=2,
        )
    return _Compiled(graph_module, sparse, packed) if packed else graph_module.forward


@dataclass(frozen=True)
class _Use:
    """The input at ``place`` is a weight that the sparse graph takes in packed form."""

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: str
    transposed: bool
    blocks: int


class _Compiled:
    """Calls the sparse graph where every weight can be packed as it is now, else the dense one."""

    def __init__(
        self, dense: fx.GraphModule, sparse: fx.GraphModule, packed: Sequence[_Use]
    ) -> None:
        self.dense, self.sparse, self.packed = dense, sparse, packed

    def __call__(self, *inputs: Any) -> Any:
        given, grad = list(inputs), torch.is_grad_enabled()
        for use in self.packed:
            weight = inputs[use.place]
            packed = None if grad and weight.requires_grad else packed_weight(weight, use)
            if packed is None:
                return self.dense(*inputs)
            given[use.place] = packed
        return self.sparse(*given)


#: For each weight that is alive, what it was packed to and as of which values.
_PACKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_weight(weight: torch.Tensor, use: _Use) -> torch.Tensor | None:
    """The packed form of a weight as it is now, from the cache if it did not change since.

    None where it cannot be packed any more. Changes are seen by version and address: writing through
    ``weight.data`` in place is not.
    """
    if (tuple(weight.shape), weight.dtype) != (use.shape, use.dtype) or weight.is_inference():
        return None
    forms = _PACKED.setdefault(weight, {})
    state, key = (weight._version, weight.data_ptr()), (use.format, use.transposed, use.blocks)
    if key not in forms or forms[key][0] != state:
        forms[key] = (state, _pack(weight, use))
    return forms[key][1]


def _pack(weight: torch.Tensor, use: _Use) -> torch.Tensor | None:
    if unreadable(weight) is not None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        form: Any = {"transposed": use.transposed, "blocks": use.blocks}
        headers = describe(weight, use.format, **form)
        if packed_bytes(headers, stacked=use.blocks > 0) >= tensor_bytes(weight):
            return None
        return pack(weight, format=use.format, headers=headers, **form)


def _rewritten(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, grad: bool
) -> tuple[fx.GraphModule, list[_Use], int]:
    """The graph with packed weights for inputs, which of its inputs they are, and how many weights
    stay dense because they require gradients and gradients are on (``grad``).

    The passes look for constants as attributes: weights are that while they are at work.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    sparse = SparseGraphModule(graph_module, graph)
    inputs = graph.find_nodes(op="placeholder")
    places = {
        f"fxsparse_input_{place}": place
        for place, (node, example) in enumerate(zip(inputs, example_inputs))
        if _is_constant(node, example)
    }
    for name, place in places.items():
        constant = torch.nn.Parameter(example_inputs[place].detach(), requires_grad=False)
        sparse.register_parameter(name, constant)
        with graph.inserting_after(inputs[-1]):
            inputs[place].replace_all_uses_with(graph.get_attr(name))
    uses: list[_Use] = []
    training = 0
    for weight in collect([sparse], {}):
        decision, paths = decide(weight, options), [weight.path, *weight.aliases]
        if not decision.sparse or not all(path in places for path in paths):
            continue
        if grad and any(example_inputs[places[path]].requires_grad for path in paths):
            training += 1
        else:
            mark(weight, decision)
            uses += [_use(places[path], weight, decision) for path in paths]
    rewrite(sparse, "", {}, inference=False)
    packed, threads = {use.place for use in uses}, options.threads_for([])[0] or 0
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target).removesuffix(SUFFIX)
        if name in places:
            value = inputs[places[name]]
            if node.users and places[name] in packed and name == node.target:
                with graph.inserting_after(inputs[-1]):
                    value = graph.call_function(stand_in, (value, threads))
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    for name in places:
        delattr(sparse, name)
    sparse.recompile()
    return sparse, uses, training


def _use(place: int, weight: Weight, decision: Decision) -> _Use:
    return _Use(
        place, decision.shape, decision.dtype, decision.format, weight.transposed, weight.blocks
    )


def _is_constant(node: fx.Node, example: Any) -> bool:
    """Whether an input is a parameter or buffer of the model, with its values at hand."""
    static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    plain = type(example) is torch.nn.Parameter or (static and type(example) is torch.Tensor)
    return plain and not example.is_inference()


if "fxsparse" not in registry._BACKENDS:  # a tree that is not installed has no entry point
    registry.register_backend(backend, name="fxsparse")
