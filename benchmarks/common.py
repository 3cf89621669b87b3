"""What the benchmarks share: timing in turns, the dense rivals, one process an instruction set."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

#: What holds MKL and oneDNN to an instruction set of fxsparse.
CAPS = {
    "avx512": {},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "generic": {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "neon": {},
}

#: Seconds of a contender's turn at the least; long enough to bring its data back into the cache.
TURN = 1.5e-3

Calls = dict[object, Callable[[], object]]


def environment(isa: str) -> dict[str, str]:
    """The environment of a process in which fxsparse, MKL and oneDNN use one instruction set."""
    # Large pages for dense weights, too: the allocator of packed weights has them where it can.
    return {**os.environ, "THP_MEM_ALLOC_ENABLE": "1", "FXSPARSE_ISA": isa, **CAPS[isa]}


def least(calls: Calls, seconds: float, rounds: int) -> dict[object, float]:
    """Least seconds of one call of each: in turns, for so long, in so many rounds at the least."""
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        for name, call in calls.items():
            turn = time.perf_counter() + TURN
            times = 0
            while True:
                start = time.perf_counter()
                call()
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
                times += 1
                if now > turn and times > 1:
                    break
        done += 1
    return best


def dense_calls(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> Calls:
    """torch's ways to multiply by a dense weight; the least of their times is "best dense"."""
    calls: Calls = {"F.linear": lambda: F.linear(x, weight, bias)}
    if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        prepacked = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        calls["prepacked"] = lambda: torch.ops.mkldnn._linear_pointwise(
            x, prepacked, bias, "none", [], ""
        )
    return calls


def torch_csr_calls(weight: torch.Tensor, x: torch.Tensor) -> Calls:
    """torch's ways to multiply by a sparse weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "sparse CSR is in beta"
        csr = weight.to_sparse_csr()
    return {"csr linear": lambda: F.linear(x, csr), "csr matmul": lambda: (csr @ x.t()).t()}


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
