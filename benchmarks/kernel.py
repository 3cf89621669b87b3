"""A sparse linear layer against torch, on this machine.

    python benchmarks/kernel.py                        # all tables: about 20 minutes
    python benchmarks/kernel.py --isa avx512 --threads 1 --batch 1 16 128 --json kernel.json

For every instruction set this CPU has and for 1 and 2 threads: how many times faster than the fastest
dense multiply torch has (`F.linear` or oneDNN with a prepacked weight), in brackets than `F.linear` and
than the faster of torch's sparse ones; above 1 fxsparse is faster. Each weight is packed for the batch
it is timed with (`batch_hint`), unless `--no-hint`. All of a row are timed in turns in one process,
each cell is the least of many calls, and dense multiplies are held to the same instruction set.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

import common
import torch
from tabulate import tabulate

SHAPES = ("768x768", "3072x768", "768x3072", "4096x4096")


def layers(
    shape: tuple[int, int], args: argparse.Namespace, batch: int | None
) -> dict[float, torch.nn.Linear]:
    """A linear for each sparsity, packed."""
    import fxsparse

    made = {}
    for sparsity in args.sparsity:
        generator = torch.Generator().manual_seed(0)
        linear = torch.nn.Linear(shape[1], shape[0], dtype=getattr(torch, args.dtype))
        weight = torch.randn(shape, generator=generator) * 0.05
        weight[torch.rand(shape, generator=generator) < sparsity] = 0
        linear.weight = torch.nn.Parameter(weight.to(linear.weight.dtype), requires_grad=False)
        made[sparsity] = fxsparse.SparseLinear.from_linear(linear, batch_hint=batch)
    return made


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A record for each cell, in a process that is held to one instruction set."""
    import fxsparse
    from fxsparse.packing import header

    threads = args.threads[0]
    torch.set_num_threads(threads)
    fxsparse.set_num_threads(threads)
    for text in args.shapes:
        shape = tuple(map(int, text.split("x")))
        for batch in args.batch:
            sparse = layers(shape, args, None if args.no_hint else batch)
            dtype = getattr(torch, args.dtype)
            x = torch.randn(batch, shape[1]).to(dtype)
            dense = torch.randn(shape).to(dtype)
            calls = common.dense_calls(dense, torch.randn(shape[0]).to(dtype), x)
            dense_names = list(calls)
            for sparsity, layer in sparse.items():
                calls["fxsparse", sparsity] = lambda layer=layer, x=x: layer(x)
                if not args.no_csr:
                    weight = layer.weight.to_dense()
                    for name, call in common.torch_csr_calls(weight, x).items():
                        calls[name, sparsity] = call
            best = common.least(calls, args.seconds, 4)
            for sparsity, layer in sparse.items():
                ours = best["fxsparse", sparsity]
                packed = layer.weight_packed
                yield {
                    "isa": fxsparse._C.isa(),
                    "threads": threads,
                    "shape": text,
                    "batch": batch,
                    "sparsity": sparsity,
                    "dtype": args.dtype,
                    "format": header(packed).format,
                    "bytes_per_weight": packed.numel() / dense.numel(),
                    "microseconds": ours * 1e6,
                    "vs_best_dense": min(best[name] for name in dense_names) / ours,
                    "vs_linear": best["F.linear"] / ours,
                    "vs_torch_csr": None
                    if args.no_csr
                    else min(best["csr linear", sparsity], best["csr matmul", sparsity]) / ours,
                }


def tables(records: list[dict]) -> Iterator[str]:
    """Markdown: speed for each instruction set and number of threads, and bytes."""
    sparsities = sorted({r["sparsity"] for r in records})
    for key in dict.fromkeys((r["isa"], r["threads"]) for r in records):
        rows: dict[tuple, dict] = {}
        for r in records:
            if (r["isa"], r["threads"]) != key:
                continue
            rest = f"{r['vs_linear']:.2f}"
            rest += f", {r['vs_torch_csr']:.1f}" if r["vs_torch_csr"] else ""
            cell = f"{r['vs_best_dense']:.2f} ({rest}) {r['format']}"
            rows.setdefault((r["shape"], r["batch"]), {})[r["sparsity"]] = cell
        yield f"{key[0]}, {key[1]} thread{'s' * (key[1] > 1)}: times faster than best dense (than F.linear, torch CSR)\n"
        lines = [[*where, *(cells[s] for s in sparsities)] for where, cells in rows.items()]
        yield tabulate(lines, ["shape", "batch", *sparsities], tablefmt="github") + "\n"
    size: dict[tuple, dict] = {}
    for r in records:
        row = size.setdefault((r["shape"], r["batch"]), {})
        row[r["sparsity"]] = f"{r['bytes_per_weight']:.3f} {r['format']}"
    yield "bytes for each weight of the dense matrix\n"
    lines = [[*where, *(cells[s] for s in sparsities)] for where, cells in size.items()]
    yield tabulate(lines, ["shape", "batch", *sparsities], tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 32, 128, 512])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.5, 0.7, 0.8, 0.9, 0.95])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--isa", nargs="+", help="only these (default: all this CPU has)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--no-hint", action="store_true", help="one packed copy for any batch")
    parser.add_argument("--no-csr", action="store_true", help="without torch's own sparse CSR")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row of a table")
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        with torch.inference_mode():
            for record in measure(args):
                print(json.dumps(record), flush=True)
        return

    import fxsparse

    records = []
    for isa in args.isa or fxsparse._C.isas():
        for threads in args.threads:
            command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
            command += ["--threads", str(threads)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=common.environment(isa)
            )
            assert process.stdout is not None
            for line in process.stdout:
                records.append(json.loads(line))
                print(line.strip(), file=sys.stderr, flush=True)
            if process.wait():
                raise SystemExit(process.returncode)
    print(f"{common.cpu_name()}, torch {torch.__version__}, {args.dtype}\n")
    for text in tables(records):
        print(text)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
