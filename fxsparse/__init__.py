"""fxsparse: sparse CPU inference for pruned PyTorch models."""

from ._native import _C as _C

