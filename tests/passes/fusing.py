"""Models of which single passes are tried, and how their graphs read."""

from fxsparse.passes import schedule
from pruned import prune
from torch import fx, nn

import fxsparse


def fused(model: nn.Module, *passes: type, **options) -> fx.GraphModule:
    """``model``, pruned and compiled with these passes alone after the rewrite."""
    before, schedule.FUSIONS = schedule.FUSIONS, passes
    try:
        return fxsparse.compile(prune(model), min_elements=0, **{"capture": "trace", **options})
    finally:
        schedule.FUSIONS = before


def calls(graph_module: fx.GraphModule) -> list[str]:
    """What a graph calls, in its order: functions by name, operators with their epilogue."""
    found = []
    for node in graph_module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            found.append(str(node.target))
        elif node.op == "call_function":
            name = node.target.__name__.split(".")[0]
            words = [word for word in node.args if isinstance(word, str)]
            found.append(" ".join([name, *words]))
    return found
