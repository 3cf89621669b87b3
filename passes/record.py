"""What passes tell each other: of a graph node, and of a weight."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

#: The key in ``node.meta`` under which a :class:`Multiply` stands.
META = "fxsparse"


@dataclass(frozen=True)
class Call:
    """The constant arguments of the operator call that replaces a node."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    threads: int


@dataclass(frozen=True)
class Multiply:
    """``y = x @ W.T`` (``x @ W`` where ``transposed``) with the weight at ``path`` of the graph.

    ``spatial``: of each pixel of images of so many dimensions.
    """

    path: str
    op: str
    transposed: bool = False
    spatial: int = 0
    call: Call | None = None


@dataclass
class Site:
    """One place that uses a weight: a graph node, or a module where ``node`` is None.

    It multiplies, or looks rows up where ``lookup``.
    """

    name: str
    transposed: bool = False
    node: fx.Node | None = None
    lookup: bool = False


@dataclass
class Weight:
    """One weight in memory, under all its names, with every place that reads it.

    ``blocked`` is the reason it must stay dense whatever its zeros. ``blocks``: it is packed as so
    many matrices, one below the other (0: as one). ``tensor`` is given up when the weight is packed,
    so that its memory can go.
    """

    path: str
    tensor: torch.Tensor | None
    op: str
    owners: list[tuple[torch.nn.Module, str]]
    aliases: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    blocked: str | None = None
    blocks: int = 0

    @property
    def transposed(self) -> bool:
        return next((site.transposed for site in self.sites if not site.lookup), False)

    @property
    def looked_up(self) -> bool:
        return any(site.lookup for site in self.sites)

    @property
    def only_looked_up(self) -> bool:
        return bool(self.sites) and all(site.lookup for site in self.sites)


@dataclass(frozen=True)
class Decision:
    """What becomes of one weight, and why. Bytes are those of its memory before and after."""

    sparse: bool
    reason: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sparsity: float
    nnz: int
    candidate: bool
    dense_bytes: int
    stored_bytes: int
    format: str = ""
    headers: list[bytes] | None = None  #: of the packed weight to be
    threads: int | None = None
