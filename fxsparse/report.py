"""The rewrite report: data first, text second."""

from __future__ import annotations

import dataclasses
import html
import json
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True)
class ReportRow:
    """What became of one weight.

    ``path`` is its first name in the model, ``aliases`` the others; ``node`` is the first graph node
    or module that multiplies by it. ``status`` is ``"sparse"`` or ``"dense"``, ``reason`` why it
    stayed dense. ``values`` is the dtype of the stored values, ``threads`` the most threads a call
    may use (None: as many as the work is worth). ``macs`` are the multiply-adds of one input row:
    one for each nonzero where packed, one for each element where dense.
    """

    node: str
    path: str
    op: str
    shape: tuple[int, ...]
    sparsity: float
    nnz: int
    status: str
    reason: str
    format: str
    values: str
    isa: str
    threads: int | None
    dense_bytes: int
    stored_bytes: int
    saved_bytes: int
    macs: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewriteReport:
    """The rows and totals of one compile. Bytes are of weights and buffers, not of activations.

    ``dense_bytes`` and ``stored_bytes`` are the bytes of the whole module before (pruning masks
    folded) and after: the distinct memory of its parameters and buffers. ``candidates`` counts the
    weights at or above the threshold, ``weight_share`` is the share of the module's bytes that was
    rewritten. ``capture`` is ``"trace"``, ``"export"`` or ``"modules"``, ``note`` says why the model
    as a whole was not traced, or what an exported graph takes. All is as of that compile: weights loaded later do not change it.

    >>> print(fxsparse.compile(model).report)  # doctest: +SKIP
    weight    op         shape      sparsity  status    format    dense    stored    reason
    --------  ---------  ---------  --------  --------  --------  -------  --------  --------
    0.weight  nn.Linear  3072x768   90.0 %    sparse    csr       9.4 MB   1.4 MB
    ...
    """

    rows: list[ReportRow] = field(default_factory=list)
    dense_bytes: int = 0
    stored_bytes: int = 0
    candidates: int = 0
    capture: str = ""
    note: str | None = None

    @property
    def saved_bytes(self) -> int:
        return self.dense_bytes - self.stored_bytes

    @property
    def rewritten(self) -> int:
        return sum(row.status == "sparse" for row in self.rows)

    @property
    def weight_share(self) -> float:
        rewritten = sum(row.dense_bytes for row in self.rows if row.status == "sparse")
        return rewritten / self.dense_bytes if self.dense_bytes else 0.0

    def summary(self) -> str:
        """One line: how many weights are sparse, and the module's bytes before and after."""
        share = self.saved_bytes / self.dense_bytes if self.dense_bytes else 0.0
        return (
            f"{self.rewritten} of {len(self.rows)} weights sparse, "
            f"{_size(self.dense_bytes)} -> {_size(self.stored_bytes)} "
            f"({_size(self.saved_bytes)} saved, {100 * share:.0f} %; weights and buffers, not activations)"
        )

    def __str__(self) -> str:
        return f"{self._table('simple')}\n{self._closing()}"

    def _closing(self) -> str:
        """The summary, and why the model kept its class where it did, or what its graph takes."""
        if self.capture == "export":
            return f"{self.summary()}\nThe graph was exported for {self.note}"
        first, *more = (self.note or "").split("; ")
        if not first:
            return self.summary()
        rest = f" (and {len(more)} more in report.note)" if more else ""
        return (
            f"{self.summary()}\nThe model keeps its class, its linears were replaced: {first}{rest}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Rows and totals as plain Python data."""
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "dense_bytes": self.dense_bytes,
            "stored_bytes": self.stored_bytes,
            "saved_bytes": self.saved_bytes,
            "rewritten": self.rewritten,
            "candidates": self.candidates,
            "weight_share": self.weight_share,
            "capture": self.capture,
            "note": self.note,
        }

    def to_json(self, **options: Any) -> str:
        """:meth:`to_dict` as JSON text; options go to ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    def to_markdown(self) -> str:
        """The table and the summary as Markdown."""
        return f"{self._table('github')}\n\n{self._closing()}"

    def to_html(self) -> str:
        """The table and the summary as HTML."""
        return f"{self._table('html')}\n<p>{html.escape(self._closing())}</p>"

    _repr_html_ = to_html

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``; needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("report.to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame([dataclasses.asdict(row) for row in self.rows])

    def _table(self, style: str) -> str:
        header = (
            "weight",
            "op",
            "shape",
            "sparsity",
            "status",
            "format",
            "dense",
            "stored",
            "reason",
        )
        cells = [
            (
                row.path + (f" (+{len(row.aliases)} names)" if row.aliases else ""),
                row.op,
                "x".join(map(str, row.shape)),
                f"{100 * row.sparsity:.1f} %",
                row.status,
                row.format,
                _size(row.dense_bytes),
                _size(row.stored_bytes),
                row.reason,
            )
            for row in self.rows
        ]
        return tabulate(cells, header, tablefmt=style, disable_numparse=True)


def _size(count: int) -> str:
    if abs(count) < 1000:
        return f"{count} B"
    return f"{count / 1e6:.1f} MB" if abs(count) >= 1e6 else f"{count / 1e3:.1f} kB"
