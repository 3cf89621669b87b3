"""``fxsparse.compile`` and ``fxsparse.inspect``: the way of a model through the passes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import fx

from .capture import Captured
from .capture import capture as capture_model
from .capture.siblings import join_siblings
from .capture.submodules import Place, attach
from .check import check_model, unwrap, unwrap_children
from .clone import share_clone
from .errors import NothingRewrittenWarning
from .memory import RELEASE_EVERY, module_bytes, release_free_memory
from .modules.attention import convert_encoders
from .options import Options, check_capture
from .passes.collect import collect
from .passes.decide import decide
from .passes.fold import fold, needs_folding
from .passes.install import install
from .passes.record import Decision, Weight
from .passes.rewrite import mark
from .passes.schedule import rewrite
from .report import RewriteReport
from .rows import report_row
from .verify import Inputs, Reference, check_inputs


def compile(
    model: torch.nn.Module,
    example_inputs: tuple | dict | None = None,
    *,
    threshold: float = 0.5,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    min_elements: int = 4096,
    values: torch.dtype | None = None,
    batch_hint: int | None = None,
    threads: int | Mapping[str, int] | None = None,
    capture: str = "auto",
    prefer: str = "memory",
    inplace: bool = False,
    verify: bool | None = None,
) -> torch.nn.Module:
    """Pack the sparse weights of a pruned model and replace the multiplies by them.

    Args:
        model: any ``nn.Module`` with its weights on the CPU. DataParallel, DDP and ``torch.compile``
            wrappers are taken off; pruning masks, parametrizations and norms of weights are folded.
        example_inputs: a tuple of positional or a dict of keyword inputs, to verify the result on
            (and to trust a trace of a model with optional arguments).
        threshold: a weight is a candidate when its fraction of exact zeros is at least this.
        include, exclude: ``fnmatch`` patterns on weight paths (``encoder.*.weight``).
        min_elements: smaller weights stay dense; 0 considers all.
        values: storage type of the nonzeros; only ``None``, the weight's own, is available yet.
        batch_hint: the number of rows typically multiplied at once; with ``prefer="latency"`` a
            weight is judged at this batch.
        threads: the most threads a node uses: one number, or numbers by weight path pattern.
            ``None`` gives each call as many as its work is worth. ``set_num_threads`` caps all.
        capture: ``"auto"``, ``"trace"`` (a GraphModule, or an error that says why its trace cannot
            be trusted), ``"export"`` (a GraphModule of ``torch.export`` on ``example_inputs``, which
            takes inputs of their structure, types and training flags), ``"modules"`` (the model's
            class is kept).
        prefer: ``"memory"`` packs every candidate that shrinks; ``"latency"`` keeps those dense that
            are expected to be slower packed.
        inplace: rewrite ``model``'s own modules and free each dense weight as soon as it is packed.
            Otherwise ``model`` stays as it is, and shares with the result what was not rewritten.
        verify: compare with the dense model on ``example_inputs``; ``None``: where they are given.

    Returns:
        A ``GraphModule`` where the whole model can be traced and the trace trusted, otherwise a
        module of the model's class. Its ``report`` says what became of each weight. Where nothing
        was rewritten, ``model`` itself, with a :class:`NothingRewrittenWarning`.

    Raises:
        TypeError, ValueError: a model or an option that is not understood.
        NotImplementedError: an option that is not available yet.
        CaptureError: ``capture="trace"`` cannot be trusted, ``"export"`` fails or would freeze what
            the model does, or the model cannot be copied.
        VerificationError: the result differs from the dense model on ``example_inputs``.

    Example:
        >>> sparse = fxsparse.compile(model)  # doctest: +SKIP
        >>> print(sparse.report)  # doctest: +SKIP
        >>> y = sparse(x)  # doctest: +SKIP
    """
    request = _Request.checked(
        model,
        example_inputs,
        threshold=threshold,
        include=include,
        exclude=exclude,
        min_elements=min_elements,
        values=values,
        batch_hint=batch_hint,
        threads=threads,
        capture=capture,
        prefer=prefer,
        verify=verify,
    )
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace: expected True or False, got {inplace!r}")
    with torch.inference_mode(False), torch.no_grad():
        result, warned = request.run(inplace)
    for category, text in warned:
        warnings.warn(text, category, stacklevel=2)
    return result


def inspect(
    model: torch.nn.Module, example_inputs: tuple | dict | None = None, **options: Any
) -> RewriteReport:
    """The report of :func:`compile` with the same options, as a dry run: nothing is changed or packed."""
    unknown = sorted(set(options) - set(signature(compile).parameters))
    if unknown:
        raise TypeError(f"inspect: expected options of fxsparse.compile, got {', '.join(unknown)}")
    options.pop("inplace", None)
    request = _Request.checked(model, example_inputs, **options)
    with torch.inference_mode(False), torch.no_grad():
        return request.rehearse().report()


@dataclass
class _Request:
    """A checked call: the unwrapped model, the options, and the model's output on its inputs."""

    model: torch.nn.Module
    options: Options
    capture: str
    inputs: Inputs | None
    reference: Reference | None

    @classmethod
    def checked(
        cls,
        model: object,
        example_inputs: object = None,
        *,
        capture: str = "auto",
        verify: bool | None = None,
        **options: Any,
    ) -> _Request:
        checked = Options.checked(**options)
        inputs = check_inputs(example_inputs)
        check_capture(capture, inputs is not None)
        if verify is not None and not isinstance(verify, bool):
            raise TypeError(f"verify: expected True, False or None, got {verify!r}")
        if verify and inputs is None:
            raise ValueError("verify=True: expected example_inputs to verify on, got none")
        unwrapped = unwrap(model)
        check_model(unwrapped)
        reference = None
        if inputs is not None and verify is not False:
            reference = Reference(unwrapped, inputs)
        return cls(unwrapped, checked, capture, inputs, reference)

    def run(self, inplace: bool) -> tuple[torch.nn.Module, list[tuple[type[Warning], str]]]:
        """Compile. Returns the result, which has its report, and what to warn of."""
        if not inplace:
            plan = self.rehearse()
        else:
            if needs_folding(self.model):
                self.rehearse()  # errors come before weights are folded
            unwrap_children(self.model)
            fold(self.model)
            plan = self.plan(self.model, inplace=True)
        warned: list[tuple[type[Warning], str]] = [(UserWarning, text) for text in plan.conflicts]
        if not any(decision.sparse for decision in plan.decisions):
            _attach(self.model, plan.report(plan.captured.root))
            text = f"nothing was rewritten: {plan.why_nothing(self.options)}"
            return self.model, [*warned, (NothingRewrittenWarning, text)]
        if inplace:
            gc.collect()  # a trace leaves reference cycles that still hold the dense weights
        result = _apply(plan)
        _attach(result, plan.report(result))
        if self.reference is not None:
            self.reference.check(result)
        release_free_memory()
        return result, warned

    def rehearse(self) -> _Plan:
        """The plan for a copy of the model that shares its weights."""
        copy = share_clone(self.model)
        unwrap_children(copy)
        fold(copy)
        return self.plan(copy, inplace=False)

    def plan(self, own: torch.nn.Module, inplace: bool) -> _Plan:
        """Capture and decide. Changes nothing."""
        equals = self.reference.equals if self.reference else None
        captured = capture_model(own, self.capture, inplace, self.inputs, equals)
        weights = collect(captured.trees, captured.graphs)
        paths = [path for weight in weights for path in (weight.path, *weight.aliases)]
        self.options.check_patterns(paths)
        weights = [w for w in weights if not w.only_looked_up or self.options.asks_for(w.path)]
        conflicts = [text for weight in weights if (text := _conflict(weight, self.options))]
        decisions = [decide(weight, self.options) for weight in weights]
        return _Plan(captured, weights, decisions, module_bytes(captured.root), conflicts)


@dataclass
class _Plan:
    """A captured model and what is to become of each of its weights."""

    captured: Captured
    weights: list[Weight]
    decisions: list[Decision]
    dense_bytes: int
    conflicts: list[str]

    def report(self, result: torch.nn.Module | None = None) -> RewriteReport:
        """The report; its bytes are counted in ``result`` where that is given, and must agree."""
        rows = [
            report_row(weight, decision) for weight, decision in zip(self.weights, self.decisions)
        ]
        stored = self.dense_bytes - sum(row.saved_bytes for row in rows)
        if result is not None and module_bytes(result) != stored:
            raise RuntimeError(
                f"fxsparse is wrong about bytes: the report says {stored}, the module holds "
                f"{module_bytes(result)}. Please report this with the model's structure"
            )
        return RewriteReport(
            rows=rows,
            dense_bytes=self.dense_bytes,
            stored_bytes=stored,
            candidates=sum(decision.candidate for decision in self.decisions),
            capture=self.captured.how,
            note=self.captured.note,
        )

    def why_nothing(self, options: Options) -> str:
        """Why no weight is to be rewritten, in one sentence."""
        if not self.weights:
            return "the model has no weights of linear, matmul, attention, convolution or recurrent layers"
        pairs = list(zip(self.weights, self.decisions))
        for weight, decision in pairs:
            if decision.candidate:
                count = sum(decision.candidate for decision in self.decisions)
                return f"{count} candidates stay dense, such as {weight.path!r}: {decision.reason}"
        most, decision = max(pairs, key=lambda pair: pair[1].sparsity)
        return (
            f"none of {len(pairs)} weights has the {100 * options.threshold:g} % zeros of the threshold; "
            f"the sparsest, {most.path!r}, has {100 * decision.sparsity:.1f} %"
        )


def _apply(plan: _Plan) -> torch.nn.Module:
    """Install the packed weights one by one, then rewrite the graphs.

    After an error every weight is dense or packed, and each graph says which.
    """
    result, *others = plan.captured.trees
    # Modules whose own forward may run: of the model that a graph was made of in place, and those
    # whose graph is only the faster way.
    runs_itself = {id(module) for tree in others for module in tree.modules()}
    for path, _ in plan.captured.graphs:
        runs_itself |= {id(module) for module in result.get_submodule(path).modules()}
    freed = 0
    threads: dict[str, int] = {}
    try:
        for weight, decision in zip(plan.weights, plan.decisions):
            if not decision.sparse:
                continue
            threads.update(dict.fromkeys([weight.path, *weight.aliases], decision.threads or 0))
            install(weight, decision, runs_itself)
            mark(weight, decision)
            freed += decision.dense_bytes
            if freed >= RELEASE_EVERY:
                release_free_memory()
                freed = 0
    finally:
        for tree in plan.captured.trees:
            convert_encoders(tree)
        rewritten = {}
        named = [(Place(path), module) for path, module in result.named_modules()]
        for place, graph_module in [*named, *plan.captured.graphs.items()]:
            if not isinstance(graph_module, fx.GraphModule):
                continue
            prefix = f"{place.path}." if place.path else ""
            if rewrite(graph_module, prefix, threads, inference=place in plan.captured.graphs):
                rewritten[place] = graph_module
        attach(result, {p: g for p, g in rewritten.items() if p in plan.captured.graphs})
        join_siblings(result)
    return result


def _attach(module: torch.nn.Module, report: RewriteReport) -> None:
    module.report = report  # type: ignore[assignment]
    if isinstance(module, fx.GraphModule):  # fx keeps on deepcopy what is named here
        module.meta.setdefault("_user_preserved_attributes", {})["report"] = report


def _conflict(weight: Weight, options: Options) -> str | None:
    chosen, found = options.threads_for([weight.path, *weight.aliases])
    if len(found) < 2:
        return None
    return f"threads: patterns give {weight.path!r} different numbers {sorted(found)}; {chosen} is used"
