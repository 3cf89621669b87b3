"""Capture: from a module to the representation that the passes rewrite.

The ladder of ``capture="auto"``: a graph of the whole model where a trace can be trusted, otherwise
the model's own class, whose modules are treated one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from ..clone import share_clone
from ..errors import CaptureError
from ..verify import Inputs
from .audit import objection, reads_training
from .effects import watched
from .export import export
from .graph_module import build
from .submodules import Place, trace_submodules
from .tracer import WatchedTracer
from .trust import OPTIONAL, doubts_before_tracing


@dataclass
class Captured:
    """What the passes work on.

    ``trees`` are the module trees whose weights are replaced: the result's, and the model's own
    where a graph of it is made in place. ``how`` is what was done; ``note`` says why the model was
    not traced as a whole, or what an exported graph takes; ``graphs`` are those of its submodules and
    of their methods, where it was not.
    """

    trees: list[torch.nn.Module]
    how: str
    note: str | None = None
    graphs: dict[Place, fx.GraphModule] = field(default_factory=dict)

    @property
    def root(self) -> torch.nn.Module:
        """What becomes the result."""
        return self.trees[0]


def capture(
    own: torch.nn.Module,
    how: str,
    inplace: bool,
    inputs: Inputs | None = None,
    equals_model: Callable[[torch.nn.Module], bool] | None = None,
) -> Captured:
    """Capture a model by ``"auto"``, ``"trace"``, ``"export"`` (on ``inputs``) or ``"modules"``.

    ``own`` is the tree to work on: the model itself where it is rewritten ``inplace``, a copy
    otherwise. It is neither run nor changed. ``equals_model`` runs a candidate on the example
    inputs; where given, it decides on traces that only their optional arguments put in doubt.
    """
    if how == "modules":
        return _by_modules(own)
    if how == "export":
        assert inputs is not None
        exported = export(own, inputs)
        return Captured([exported, own] if inplace else [exported], "export", f"{exported._inputs}")
    doubts = []
    if how == "auto" and callable(getattr(own, "generate", None)):
        doubts.append("the model has generate(), which a graph would lose")
    doubts += doubts_before_tracing(own)
    if not doubts or (doubts == [OPTIONAL] and equals_model is not None):
        traced, found = trace(own)
        if traced is not None and doubts and equals_model is not None and not equals_model(traced):
            found = ["the trace differs on example_inputs"]
        if traced is not None and not found:
            return Captured([traced, own] if inplace else [traced], "trace")
        doubts = found
    if how == "trace":
        raise CaptureError(
            f"capture='trace': the trace of {type(own).__name__} cannot be trusted: "
            f"{_text(doubts)}. Use capture='auto' or 'modules'"
            + (", or give example_inputs" if doubts == [OPTIONAL] else "")
        )
    return _by_modules(own, _text(doubts))


def _by_modules(own: torch.nn.Module, note: str | None = None) -> Captured:
    graphs = trace_submodules(own, lambda module, method: trace(module, method)[0])
    return Captured([own, *graphs.values()], "modules", note, graphs)


def _text(doubts: list[str]) -> str:
    return "; ".join(dict.fromkeys(doubts))


def trace(
    model: torch.nn.Module, method: str = "forward"
) -> tuple[fx.GraphModule | None, list[str]]:
    """Trace a method of ``model`` on a scratch copy; the graph module gets ``model``'s own modules and
    tensors.

    Returns the graph module, or None and the reasons to distrust the trace.
    """
    tracer = WatchedTracer(method)
    try:
        scratch = share_clone(model)
        with watched(scratch) as effects:
            graph = tracer.trace(scratch)
        doubts = [*tracer.doubts, *_objections(tracer)]
        doubts += [f"forward {effect}, which a graph would not" for effect in effects]
        if not doubts and any(map(reads_training, tracer.watch.codes)):
            doubts = _doubts_about_training(scratch, graph, method)
        return (None, doubts) if doubts else (build(graph, model), [])
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:200]
        text = f"symbolic_trace fails: {type(error).__name__}: {text}"
        return None, list(_objections(tracer)) or [text]


def _objections(tracer: WatchedTracer) -> Iterator[str]:
    for code, known in tracer.watch.codes.items():
        if found := objection(code, known):
            yield found


def _doubts_about_training(scratch: torch.nn.Module, graph: fx.Graph, method: str) -> list[str]:
    """What is to be said where other training flags make another graph than ``graph``: all on, all off,
    every second one on. Changes the flags of ``scratch``."""
    doubt = "forward does something else in training, which a trace freezes"
    modules = list(scratch.modules())
    traced = [module.training for module in modules]
    for flags in ((not scratch.training,), (scratch.training,), (True, False), (False, True)):
        pattern = list(itertools.islice(itertools.cycle(flags), len(modules)))
        if pattern == traced:
            continue
        for module, flag in zip(modules, pattern):
            module.training = flag
        tracer = WatchedTracer(method)
        try:
            with watched(scratch) as effects:
                same = str(tracer.trace(scratch)) == str(graph)
        except Exception:
            return [doubt]
        if not same or tracer.doubts or effects or any(_objections(tracer)):
            return [doubt]
    return []
