"""Measure this machine for the choice of formats and threads.

    python benchmarks/calibrate.py costs.inc
    FXSPARSE_COSTS=costs.inc python my_program.py

Times every format and the fastest dense multiply (``F.linear`` or oneDNN with a prepacked weight) over
a grid of sizes, batches and densities: fp32, one thread, each cell the least of several rounds, for
every instruction set this CPU has. Dense multiplies are held to the same instruction set, in a process
of its own. Takes about three minutes an instruction set. The table that fxsparse uses where nothing
else is named, ``kernel/op/costs.inc``, was made by this.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from collections.abc import Callable

import common
import torch

SHAPES = ((768, 768), (2048, 1024), (4096, 4096))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def time_batch(
    isa: str, dense: torch.Tensor, packed: dict[object, torch.Tensor], batch: int, rounds: int
) -> dict[object, float]:
    """Seconds of one multiply by the dense weight ("dense") and by each packed one of its shape."""
    from fxsparse import _C

    rows, cols = dense.shape
    x, y = torch.randn(batch, cols), torch.empty(batch, rows)

    def sparse(blob: torch.Tensor) -> Callable[[], object]:
        where = (blob.data_ptr(), blob.numel(), x.data_ptr(), cols, batch, 0, y.data_ptr(), rows, 1)
        return lambda: _C.run_kernel(isa, *where)

    calls = {key: sparse(blob) for key, blob in packed.items()}
    dense_ways = common.dense_calls(dense, None, x)
    best = common.least({**calls, **dense_ways}, 0, rounds)
    best["dense"] = min(best[name] for name in dense_ways)
    return best


def measure(isa: str, rounds: int) -> list[str]:
    """Lines of the table for one instruction set, in a process that is held to it."""
    from fxsparse import _C
    from fxsparse.packing import pack

    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = []
    for shape in SHAPES:
        packed: dict[object, torch.Tensor] = {}
        for density in _C.cost_densities:
            weight = torch.randn(shape) * (torch.rand(shape) < density)
            for format in _C.formats():
                packed[format, density] = pack(weight, format=format)
        dense = torch.randn(shape)
        for batch in BATCHES:
            best = time_batch(isa, dense, packed, batch, rounds)
            for format in ("dense", *_C.formats()):
                keys = ["dense" if format == "dense" else (format, d) for d in _C.cost_densities]
                cells = ", ".join(f"{best[key] * 1e12 / dense.numel():.4g}" for key in keys)
                lines.append(f"FXSPARSE_COST({isa}, {format}, {dense.numel()}, {batch}, {cells})")
            print(f"{isa} {shape[0]}x{shape[1]} batch {batch}", file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", help="the file to write")
    parser.add_argument("--isa", nargs="+", help="only these (default: all this CPU has)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        with torch.inference_mode(), open(args.output, "w") as file:
            file.write("\n".join(measure(args.isa[0], args.rounds)) + "\n")
        return

    from fxsparse import _C

    parts = []
    for isa in args.isa or _C.isas():
        part = f"{args.output}.{isa}"
        command = [sys.executable, __file__, part, "--worker", "--isa", isa]
        command += ["--rounds", str(args.rounds)]
        subprocess.run(command, check=True, env=common.environment(isa))
        with open(part) as file:
            parts.append(file.read())
        os.remove(part)
    with open(args.output, "w") as file:
        file.write(
            f"// Measured by benchmarks/calibrate.py on {datetime.date.today()}: {common.cpu_name()},\n"
            f"// torch {torch.__version__}. Picoseconds for each element of the dense weight, fp32, one\n"
            "// thread: instruction set, format, elements, batch, then the densities of kCostDensity.\n"
            + "".join(parts)
        )


if __name__ == "__main__":
    main()
