"""``fxsparse.to_dense``: the way back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.fx.passes.infra.pass_manager import PassManager

from . import ops
from .capture.siblings import part_siblings
from .capture.submodules import detach
from .clone import share_clone
from .modules import SparseModule
from .modules.attention import SparseTransformerEncoder
from .modules.recurrent import SparseRecurrent
from .modules.state import packed_names, release_packed
from .packing import SUFFIX, header, unpack
from .passes.collect import graphs
from .passes.unfuse import Unfuse
from .stand_in.weight_view import stand_in


def to_dense(module: torch.nn.Module) -> torch.nn.Module:
    """The same kind of module with dense weights, bit for bit, under the original ``state_dict`` keys
    (masks folded).

    ``module`` stays as it is and shares no memory with the result. Tied weights stay tied.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(module).__name__}")
    for path, buffer in module.named_buffers():
        if buffer.is_meta and path.endswith(SUFFIX):
            raise ValueError(
                f"{path} is on the meta device and has no values: load the weights first"
            )
    packed = [m._buffers[name] for m in module.modules() for name in packed_names(m)]
    copy = share_clone(module, also=[p for p in packed if p is not None], share_parameters=False)
    detach(copy)
    part_siblings(copy)
    dense: dict[int, torch.Tensor] = {}
    for graph_module in graphs(copy):
        PassManager([Unfuse(), Densify()])(graph_module)
    for submodule in copy.modules():
        _restore(submodule, dense)
        if isinstance(submodule, SparseTransformerEncoder):
            submodule.restore()
    for graph_module in graphs(copy):
        graph_module.recompile()
        graph_module.meta.pop("_user_preserved_attributes", None)
    copy.__dict__.pop("report", None)  # of what it was
    return copy


class Densify(PassBase):
    """Turns calls of the operators back into functions of torch with a dense weight."""

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        graph, modified = graph_module.graph, False
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is stand_in:
                _undo_stand_in(graph, node)
                modified = True
            if node.op != "call_function" or node.target not in (ops.linear, ops.conv1x1):
                continue
            x, packed, bias = node.args[:3]
            function: Callable = F.linear
            if node.target is ops.conv1x1:
                function = F.conv1d if node.args[-1] == 1 else F.conv2d
            assert isinstance(packed, fx.Node)
            buffer = graph_module.get_buffer(str(packed.target))
            with graph.inserting_before(node):
                weight = graph.create_node("get_attr", str(packed.target).removesuffix(SUFFIX))
                if header(buffer).transposed:
                    weight = graph.call_method("t", (weight,))
                new = graph.call_function(function, (x, weight, bias))
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            if not packed.users:
                graph.erase_node(packed)
            modified = True
        return PassResult(graph_module, modified)


def _undo_stand_in(graph: fx.Graph, node: fx.Node) -> None:
    packed = node.args[0]
    assert isinstance(packed, fx.Node)
    with graph.inserting_before(node):
        weight = graph.create_node("get_attr", str(packed.target).removesuffix(SUFFIX))
    node.replace_all_uses_with(weight)
    graph.erase_node(node)
    if not packed.users:
        graph.erase_node(packed)


def _restore(module: torch.nn.Module, dense: dict[int, torch.Tensor]) -> None:
    """Replace the packed weights that ``module`` itself holds."""
    for name in packed_names(module):
        attribute = name.removesuffix(SUFFIX)
        packed = module._buffers[name]
        assert packed is not None
        weight = _weight(packed, dense)
        if isinstance(module, SparseModule):
            assert isinstance(weight, torch.nn.Parameter)
            module.restore(weight)
            continue
        if isinstance(module, SparseRecurrent):
            assert isinstance(weight, torch.nn.Parameter)
            module.restore(attribute, weight)
            continue
        persistent = name not in module._non_persistent_buffers_set
        delattr(module, name)
        module.__dict__.pop(attribute, None)  # a stand-in
        if isinstance(weight, torch.nn.Parameter):
            module.register_parameter(attribute, weight)
        else:
            module.register_buffer(attribute, weight, persistent=persistent)
    if not isinstance(module, SparseModule):
        release_packed(module)


def _weight(packed: torch.Tensor, dense: dict[int, torch.Tensor]) -> torch.Tensor:
    if packed.data_ptr() not in dense:
        head, weight = header(packed), unpack(packed)
        if not head.is_buffer:
            weight = torch.nn.Parameter(weight, requires_grad=head.requires_grad)
        dense[packed.data_ptr()] = weight
    return dense[packed.data_ptr()]
