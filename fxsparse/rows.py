"""Makes report rows of weights and decisions."""

from __future__ import annotations

from ._native import _C
from .passes.record import Decision, Weight
from .report import ReportRow


def report_row(weight: Weight, decision: Decision) -> ReportRow:
    """One row: what becomes of ``weight``."""
    elements = 1
    for size in decision.shape:
        elements *= size
    return ReportRow(
        node=weight.sites[0].name if weight.sites else "",
        path=weight.path,
        op=weight.op,
        shape=decision.shape,
        sparsity=decision.sparsity,
        nnz=decision.nnz,
        status="sparse" if decision.sparse else "dense",
        reason=decision.reason,
        format=decision.format,
        values=str(decision.dtype).removeprefix("torch."),
        isa=_C.isa() if decision.sparse else "",
        threads=decision.threads,
        dense_bytes=decision.dense_bytes,
        stored_bytes=decision.stored_bytes,
        saved_bytes=decision.dense_bytes - decision.stored_bytes,
        macs=decision.nnz if decision.sparse else elements,
        aliases=tuple(weight.aliases),
    )
