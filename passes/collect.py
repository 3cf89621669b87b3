"""Finds every weight of a captured model: one record a weight in memory, with all that read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx
from torch.fx.passes.infra.pass_manager import PassManager

from fxsparse.capture.submodules import Place
from fxsparse.memory import storages
from fxsparse.packing import SUFFIX

from .fold import unfolded
from .kinds import (
    forward_reads_parameters,
    is_plain,
    module_weights,
    operation,
)
from .normalise import META, Normalise, attribute, read
from .record import Site, Weight
from .uses import constant_path, final_uses, stand_in_site

#: Functions and methods that multiply by a weight in a way that is not rewritten.
_MULTIPLIES = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "bilinear",
        "einsum",
        "tensordot",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "matmul",
        "mm",
        "addmm",
        "linear",
        "multi_head_attention_forward",
        "dot",
        "inner",
        "scaled_dot_product_attention",
    ]
)


@dataclass(frozen=True)
class _Read:
    """One place that reads the parameter at ``path``; ``listed``: it belongs in the report."""

    path: str
    op: str
    listed: bool
    site: Site | None = None
    reason: str | None = None
    blocks: int = 0


def collect(trees: list[torch.nn.Module], graphs: dict[Place, fx.GraphModule]) -> list[Weight]:
    """The weights of ``trees[0]``, in the order of its parameters, each once whatever its names.

    ``trees`` are all module trees that hold them; ``graphs`` the graphs of submodules and methods.
    """
    root = trees[0]
    reads: dict[str, list[_Read]] = {}
    by_path: dict[str, dict[str, fx.GraphModule]] = {}
    for (path, method), graph_module in graphs.items():
        by_path.setdefault(path, {})[method] = graph_module
    for found in _module_reads(root, "", None, graphs=by_path):
        reads.setdefault(found.path, []).append(found)

    groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
    named: list[tuple[str, torch.Tensor]] = [*root.named_parameters(remove_duplicate=False)]
    for path, buffer in root.named_buffers(remove_duplicate=False):
        named.append((path, buffer))
        if path not in reads:
            reason = f"shares its memory with the buffer {path!r}"
            reads[path] = [_Read(path, "buffer", False, reason=reason)]
    for path, tensor in named:
        groups.setdefault(_key(tensor), []).append((path, tensor))

    owners = _owners(trees)
    uses = Counter(block for group in groups.values() for block in _blocks(group))
    weights = []
    for key, group in groups.items():
        readers = [r for path, _ in group for r in reads.get(path, [])]
        if any(r.listed for r in readers):
            weights.append(_weight(group, readers, owners.get(key, [])))
            if any(uses[block] > 1 for block in _blocks(group)):
                weights[-1].blocked = "shares the indices of its nonzeros with another tensor"
    return weights


def graphs(root: torch.nn.Module) -> list[fx.GraphModule]:
    """Every GraphModule of a tree."""
    return [module for module in root.modules() if isinstance(module, fx.GraphModule)]


def _weight(
    group: list[tuple[str, torch.Tensor]],
    reads: list[_Read],
    owners: list[tuple[torch.nn.Module, str]],
) -> Weight:
    path, tensor = group[0]
    listed = next(r for r in reads if r.listed)
    sites = [r.site for r in reads if r.site is not None]
    reason = next((r.reason for r in reads if r.reason is not None), None)
    blocks = {read.blocks for read in reads if read.site is not None}
    views = {_view(tensor) for _, tensor in group}
    multiplies = [site for site in sites if not site.lookup]
    if reason is None and len(views) > 1:
        reason = f"shares its memory with {group[1][0]!r} in another form"
    if reason is None and any(_has(owner, name + SUFFIX) for owner, name in owners):
        reason = f"its module has an attribute {path.rpartition('.')[2] + SUFFIX!r} already"
    if reason is None and len({site.transposed for site in multiplies}) > 1:
        reason = "multiplied both as it is and transposed"
    if reason is None and len(sites) > len(multiplies) and any(s.transposed for s in multiplies):
        reason = "rows are looked up and it is multiplied transposed"
    if reason is None and len(blocks) > 1:
        reason = "one reader takes it in parts, another as a whole"
    count = max(blocks, default=0)
    aliases = [p for p, _ in group[1:]]
    return Weight(path, tensor, listed.op, owners, aliases, sites, reason, count)


def _has(module: torch.nn.Module, name: str) -> bool:
    return any(name in names for names in (module._buffers, module._parameters, module.__dict__))


def _view(tensor: torch.Tensor) -> tuple:
    if tensor.layout == torch.strided:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return tensor.layout, tensor.shape, tensor.dtype, *storages(tensor)


def _blocks(group: list[tuple[str, torch.Tensor]]) -> set[int]:
    return {address for _, tensor in group for address, size in storages(tensor) if size}


def _key(tensor: torch.Tensor) -> int:
    address, size = storages(tensor)[-1]  # of its values, where it has indices too
    return address if size else id(tensor)


def _owners(trees: list[torch.nn.Module]) -> dict[int, list[tuple[torch.nn.Module, str]]]:
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    seen = set()
    for tree in trees:
        for module in tree.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    owners.setdefault(_key(tensor), []).append((module, name))
    return owners


def _module_reads(
    module: torch.nn.Module,
    prefix: str,
    blocked: str | None,
    held_by: tuple[torch.nn.Module, str] | None = None,
    graphs: Mapping[str, dict[str, fx.GraphModule]] = MappingProxyType({}),
) -> Iterator[_Read]:
    """Reads of a module that runs its own ``forward``; ``blocked``: a parent reads its weights too."""
    methods = graphs.get(prefix.rstrip("."), {}) if blocked is None else {}
    module = methods.get("forward", module)
    if isinstance(module, fx.GraphModule):
        yield from _graph_reads(module, prefix)
        return
    weights = {own.name: own for own in module_weights(module, held_by)}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is None or (name in module._buffers and name not in weights):
            continue
        path, kind = prefix + name, type(module).__name__
        if name not in weights:
            yield _Read(path, kind, False, reason=f"also read by {kind} {prefix.rstrip('.')!r}")
            continue
        own = weights[name]
        reason = blocked or unfolded.get(module, own.reason)
        site = None
        if reason is None:
            site = Site(prefix.rstrip("."), own.transposed, lookup=own.lookup)
        yield _Read(path, own.op, True, site, reason, own.blocks)
    for graph_module in methods.values():
        yield from _graph_reads(graph_module, prefix)
    traced = {name for graph in methods.values() for name, _ in graph.named_children()}
    blocked = blocked or forward_reads_parameters(module)
    for name, child in module._modules.items():
        if child is not None and name not in traced:
            yield from _module_reads(child, f"{prefix}{name}.", blocked, (module, name), graphs)


def _graph_reads(graph_module: fx.GraphModule, prefix: str) -> Iterator[_Read]:
    """Reads of the nodes of a graph, of the modules it calls, and what it does not read at all."""
    PassManager([Normalise()])(graph_module)
    seen = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            reads = _attribute_reads(graph_module, node, prefix)
        elif node.op == "call_module":
            reads = _call_reads(graph_module, node, prefix)
        else:
            continue
        for found in reads:
            seen.add(found.path)
            yield found
    for name, parameter in graph_module.named_parameters(remove_duplicate=False):
        if prefix + name not in seen and parameter.dim() >= 2:
            yield _Read(prefix + name, "unused", True)


def _call_reads(graph_module: fx.GraphModule, node: fx.Node, prefix: str) -> Iterator[_Read]:
    path = f"{prefix}{node.target}"
    module = graph_module.get_submodule(str(node.target))
    if is_plain(module):
        op = operation(module)
        yield _Read(f"{path}.weight", op, True, Site(node.name, node=node))
        if module.bias is not None:
            yield _Read(f"{path}.bias", op, False, reason="read as a bias")
    else:
        yield from _module_reads(module, f"{path}.", None)


def _attribute_reads(graph_module: fx.GraphModule, node: fx.Node, prefix: str) -> Iterator[_Read]:
    target = str(node.target)
    tensor = attribute(graph_module, target)
    if not isinstance(tensor, torch.Tensor):
        return
    for use in final_uses(node, stacked=tensor.dim() == 3):
        user = use.user
        multiply = user.meta.get(META)
        if (
            multiply is not None
            and multiply.path == target
            and _reads_only_as_weight(graph_module, user)
        ):
            call = Site(user.name, multiply.transposed, user)
            yield _Read(prefix + target, multiply.op, True, call)
            continue
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        site = None if multiply is not None else stand_in_site(use)
        if site is not None and tensor.dim() in (2, 3) and not use.asks_a_fact:
            blocks = tensor.shape[0] if tensor.dim() == 3 else 0
            yield _Read(prefix + target, use.name, not site.lookup, site, None, blocks)
        elif not use.asks_a_fact:
            listed = tensor.dim() >= 2 and (is_parameter or use.name in _MULTIPLIES)
            how = f"also read by {user.name}"
            if use.name in _MULTIPLIES and multiply is None:
                how = f"{use.name} with a constant weight is not rewritten yet"
            yield _Read(prefix + target, use.name, listed, reason=how)


def _reads_only_as_weight(graph_module: fx.GraphModule, user: fx.Node) -> bool:
    """False where the same constant is the multiply's x, bias or addend as well."""
    operands = read(graph_module, user)
    assert operands is not None
    others = (operands.x, operands.added)
    return not any(constant_path(other) == operands.multiply.path for other in others)
