"""The thread pool and the CPU's features."""

from __future__ import annotations

from ._native import _C
from .options import check_threads


def set_num_threads(n: int) -> None:
    """Set the size of the pool: the most threads that any multiply uses, the caller's included."""
    check_threads(n, "n", optional=False)
    _C.set_num_threads(n)


def get_num_threads() -> int:
    """The size of the pool; by default the CPUs this process may use (affinity and cgroup quota).

    The environment variable ``FXSPARSE_NUM_THREADS`` overrides the default.
    """
    return int(_C.get_num_threads())


def cpu_features() -> dict[str, bool]:
    """The instruction set extensions that kernels can be chosen by, and whether this CPU has them.

    ``FXSPARSE_ISA=generic|avx2|avx512|neon`` forces a variant.
    """
    return dict(_C.cpu_features())
