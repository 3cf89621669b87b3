"""The kernel against torch: a Markdown table of time ratios (above 1: fxsparse is faster).

    python benchmarks/kernel.py --threads 1 --batch 1 8 128 --sparsity .5 .9

Contenders are timed in turn in one process and each cell is the least of many repeats, so that
another program's load hits all alike. "torch CSR" is the faster of `F.linear` with a CSR weight and
`(w @ x.t()).t()`; "best dense" is the faster of `F.linear` and oneDNN with a prepacked weight.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate

VALUES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def pack(weight: torch.Tensor, format: str = "csr") -> torch.Tensor:
    from fxsparse import _C

    value = VALUES[weight.dtype]
    view = (weight.data_ptr(), *weight.shape, *weight.stride(), value)
    packed = torch.empty(
        _C.packed_bytes(format, *weight.shape, _C.count_nonzeros(*view), value), dtype=torch.uint8
    )
    _C.pack(*view, format, 0, packed.data_ptr(), packed.numel())
    return packed


def contenders(
    weight: torch.Tensor, x: torch.Tensor, threads: int, with_dense: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    rows, cols = weight.shape
    bias = torch.randn(rows, dtype=weight.dtype)
    packed = pack(weight)
    linear = torch.ops.fxsparse.linear.default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "sparse CSR is in beta"
        csr = weight.to_sparse_csr()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "fxsparse": lambda: linear(x, packed, bias, rows, cols, weight.dtype, threads),
        "csr linear": lambda: F.linear(x, csr),
        "csr matmul": lambda: (csr @ x.t()).t(),
    }
    if with_dense:
        calls["F.linear"] = lambda: F.linear(x, weight, bias)
        if weight.dtype == torch.float32:
            prepacked = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
            calls["oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(
                x, prepacked, bias, "none", [], ""
            )
    return calls


def measure(calls: dict[str, Callable[[], torch.Tensor]], seconds: float) -> dict[str, float]:
    """Least time of one call of each, in seconds; rounds of all contenders in turn."""
    best = dict.fromkeys(calls, float("inf"))
    loops = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        once = max(time.perf_counter() - start, 1e-6)
        loops[name] = max(1, int(2e-4 / once))  # the clock's own cost must not show
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            call()  # brings its data back into cache after the others
            start = time.perf_counter()
            for _ in range(loops[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / loops[name])
        rounds += 1
    return best


def row(
    shape: tuple[int, int], batch: int, sparsity: float, args: argparse.Namespace
) -> list[object]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    weight = torch.randn(shape, generator=generator)
    weight[torch.rand(shape, generator=generator) < sparsity] = 0
    weight = weight.to(dtype)
    x = torch.randn(batch, shape[1], generator=generator).to(dtype)
    times = measure(contenders(weight, x, args.threads, not args.no_dense), args.seconds)
    ours = times["fxsparse"]
    csr = min(times["csr linear"], times["csr matmul"])
    cells: list[object] = [f"{shape[0]}x{shape[1]}", batch, sparsity, ours * 1e6, csr / ours]
    if not args.no_dense:
        dense = min(times["F.linear"], times.get("oneDNN", float("inf")))
        cells += [times["F.linear"] / ours, dense / ours]
    gflops = 2 * batch * int(weight.count_nonzero()) / ours / 1e9
    return [*cells, gflops]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["768x768", "3072x768", "4096x4096"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 128])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.5, 0.8, 0.9, 0.95])
    parser.add_argument("--dtype", default="float32", choices=list(VALUES.values()))
    parser.add_argument("--threads", type=int, default=1, help="of fxsparse and of torch")
    parser.add_argument("--isa", help="sets FXSPARSE_ISA")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell")
    parser.add_argument("--no-dense", action="store_true")
    args = parser.parse_args()
    if args.isa:
        os.environ["FXSPARSE_ISA"] = args.isa
    import fxsparse

    torch.set_num_threads(args.threads)
    fxsparse._C.set_num_threads(args.threads)
    headers = ["shape", "batch", "zeros", "us", "vs torch CSR"]
    headers += [] if args.no_dense else ["vs F.linear", "vs best dense"]
    with torch.inference_mode():
        table = [
            row(tuple(map(int, shape.split("x"))), batch, sparsity, args)
            for shape in args.shapes
            for batch in args.batch
            for sparsity in args.sparsity
        ]
    print(f"{fxsparse._C.isa()}, {args.dtype}, threads {args.threads}, torch {torch.__version__}\n")
    print(tabulate(table, [*headers, "GFLOP/s"], tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()
