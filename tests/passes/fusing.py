"""Models of which single passes are tried, and how their graphs read."""

import torch
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


def same(sparse, model, x, **tolerances) -> None:
    torch.testing.assert_close(sparse(x), model(x), equal_nan=True, **tolerances)


def same_values(sparse, model, rows: int, dtype: torch.dtype, tolerance: float) -> None:
    """Both give the same for strided rows of 64 values, with NaN and Inf among them, too;
    ``tolerance`` is that of 16 bits."""
    x = torch.randn(64, rows).to(dtype).t()
    close = {"rtol": tolerance, "atol": tolerance} if dtype.itemsize == 2 else {}
    same(sparse, model, x, **close)
    x[0, 3] = float("nan")
    x[-1, 5] = float("inf")
    same(sparse, model, x, **close)
