"""The code of a rewritten graph as it is run: what a call looks up costs little.

``fx`` reads a constant as ``self.layer.weight_packed``, through ``nn.Module.__getattr__`` twice, which
takes 1 us where the multiply of a small layer takes 2. Here it comes straight from the module's dicts,
at the start, and operators are called by :data:`fxsparse.ops.QUICK`. Nothing is kept from call to call,
so what is loaded, moved or replaced is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen, _format_target, _PyTreeCodeGen
from torch.fx.graph_module import _forward_from_src

from .. import ops

_PLAIN = "_plain_forward"


def quick_forward(
    root: torch.nn.Module, graph: fx.Graph, plain: Callable[..., Any]
) -> Callable[..., Any]:
    """``forward`` of ``root`` by ``graph``; ``plain`` is the function that ``fx`` makes of the graph.

    ``plain`` runs where a constant is not where it was: where a bias was pruned or parametrized since.
    """
    arguments = _arguments(graph)
    if arguments is None:
        return plain
    called = _called(root, graph)
    quick = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    quick.set_codegen(graph._codegen)
    reads: dict[str, str] = {}
    for node in graph.nodes:
        copied = copies[node] = quick.node_copy(node, copies.__getitem__)
        if node.op == "call_function":
            copied.target = ops.QUICK.get(node.target, node.target)
        elif node.op == "get_attr" and node.users:
            path = str(node.target)
            if (read := _read(root, path, called)) is not None:
                written = f"{copied.name} = {_format_target('self', path)}"
                reads[written] = f"{copied.name} = {read}"

    def look_up_first(body: list[str]) -> list[str]:
        found = [reads[line] for line in body if line in reads]
        if not found:
            return body
        look_up = "".join(f"    {line}\n" for line in found)
        leave = f"    return {_PLAIN}({', '.join(['self', *arguments])})\n"
        rest = ["" if line in reads else line for line in body]
        return ["try:\n", look_up, "except KeyError:\n", leave, *rest]

    with quick.on_generate_code(lambda _: look_up_first):
        code = quick.python_code("self")
    return _forward_from_src(code.src, {**code.globals, _PLAIN: plain})


def _arguments(graph: fx.Graph) -> list[str] | None:
    """What ``forward`` passes on to a function of the same signature; None where that is not known."""
    codegen = graph._codegen
    if codegen._body_transformer is not None:
        return None
    if isinstance(codegen, _PyTreeCodeGen):
        return [name for name in codegen.pytree_info.orig_args if name != "self"]
    if type(codegen) is not CodeGen:
        return None
    return [str(node.target) for node in graph.nodes if node.op == "placeholder"]


def _called(root: torch.nn.Module, graph: fx.Graph) -> set[int]:
    """The ids of modules whose forward runs, which may give them another tensor meanwhile."""
    paths = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return {id(module) for path in paths for module in root.get_submodule(path).modules()}


def _read(root: torch.nn.Module, path: str, called: set[int]) -> str | None:
    """The place of a parameter or buffer in the dicts of its modules; None where it is not to be read
    from there, before anything else."""
    *parents, name = path.split(".")
    text, module = "self", root
    for parent in parents:
        if (child := module._modules.get(parent)) is None:
            return None
        text, module = f"{text}._modules[{parent!r}]", child
    if id(module) in called or type(module).__getattr__ is not torch.nn.Module.__getattr__:
        return None
    for kind in ("_buffers", "_parameters"):
        if name in getattr(module, kind):
            return f"{text}.{kind}[{name!r}]"
    return None
