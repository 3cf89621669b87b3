"""The passes that a graph goes through once the packed weights are installed, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase
from torch.fx.passes.infra.pass_manager import PassManager

from .chain import Chain
from .epilogue import Epilogue
from .follow import Follow
from .no_ops import NoOps
from .rewrite import Rewrite
from .siblings import Siblings

#: Passes that join calls. Each is free to be left out; in this order each leaves to the next what has
#: less to gain.
FUSIONS: tuple[type[PassBase], ...] = (Chain, Epilogue, Siblings)


def rewrite(
    graph_module: fx.GraphModule, prefix: str, threads: Mapping[str, int], inference: bool
) -> bool:
    """Run all of them; False where the graph multiplies by no packed weight and stays as it is.

    ``prefix`` and ``threads`` are those of :class:`Rewrite`, ``inference`` is that of :class:`NoOps`.
    """
    modified = PassManager([Rewrite(prefix, threads)])(graph_module).modified
    if modified:
        passes: list[Any] = [NoOps(inference), *(fusion() for fusion in FUSIONS), Follow()]
        PassManager(passes)(graph_module)
    graph_module.recompile()
    return modified
