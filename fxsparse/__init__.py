"""fxsparse: sparse CPU inference for pruned PyTorch models.

>>> import fxsparse
>>> sparse = fxsparse.compile(model)  # doctest: +SKIP
>>> print(sparse.report)  # doctest: +SKIP
"""

from . import errors, fused_ops, ops
from .compiler import compile, inspect
from .dense import to_dense
from .errors import CaptureError, NothingRewrittenWarning, VerificationError
from .modules import SparseConv1d, SparseConv2d, SparseLinear
from .report import ReportRow, RewriteReport
from .threads import cpu_features, get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "NothingRewrittenWarning",
    "ReportRow",
    "RewriteReport",
    "SparseConv1d",
    "SparseConv2d",
    "SparseLinear",
    "VerificationError",
    "compile",
    "cpu_features",
    "errors",
    "fused_ops",
    "get_num_threads",
    "inspect",
    "ops",
    "set_num_threads",
    "to_dense",
]
