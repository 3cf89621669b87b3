"""Whole pruned models against the same models dense, on this machine.

    python benchmarks/models.py                                       # about 10 minutes
    python benchmarks/models.py --only minilm --sparsity 0.9 --compile --json models.json
    python benchmarks/models.py --only encoder --deepsparse other-env/bin/python

Milliseconds on one thread, and in brackets how many times faster than torch's eager mode; all of a line
are timed in turns in one process, each is the least of many calls. *without linears* is the same dense
model whose linears cost nothing: what is left for sparsity to gain lies between it and dense.

*exported* is `capture="export"`; `--compile` adds the dense and the compiled model under
`torch.compile`. The peers run the encoder, which onnx can say: onnxruntime where it is installed (with
onnx), DeepSparse where `--deepsparse` names the Python of an environment that has it. `--memory` adds
what each takes: the growth of a process that loads the pruned encoder and runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import common
import peers
import torch
import workloads
from tabulate import tabulate
from torch import nn
from workloads import Workload

import fxsparse


def contenders(work: Workload, dense: nn.Module, args: argparse.Namespace) -> dict[str, nn.Module]:
    """The forms of a pruned model that are timed."""
    options = {"batch_hint": work.hint, "threads": 1, "min_elements": 0}
    options["exclude"] = [f"{path}.*" for path in work.kept]
    sparse = fxsparse.compile(dense, **options)
    made = {"eager": dense, "fxsparse": sparse}
    if work.inputs is not None:
        made["exported"] = fxsparse.compile(
            dense, work.inputs, capture="export", verify=False, **options
        )
    made["without linears"] = workloads.without_linears(dense, work.kept)
    if args.compile and work.more == 1:
        made["eager, torch.compile"] = torch.compile(dense)
        for form in ("fxsparse", "exported"):
            if form in made:
                made[f"{form}, torch.compile"] = torch.compile(made[form])
    return made


def check(name: str, outputs: dict[str, object]) -> None:
    """Exit where a compiled model gives something else than the dense one."""
    expected = outputs["eager"]
    for form, output in outputs.items():
        if form == "without linears" or not isinstance(output, torch.Tensor):
            continue
        if output.is_floating_point():
            same = (output - expected).abs().max() <= 1e-4 * expected.abs().max()
        else:
            same = torch.equal(output, expected)
        if not same:
            raise SystemExit(f"{name}: {form} gives something else than eager")


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A record for each workload and sparsity: milliseconds of each contender."""
    for sparsity in args.sparsity:
        for model, make in workloads.MODELS.items():
            if args.only and model not in args.only:
                continue
            try:
                yield from measure_model(model, make, sparsity, args)
            except workloads.Missing as missing:
                print(f"{model} is left out: {missing}", file=sys.stderr)


def measure_model(
    model: str, make: Callable[[], nn.Module], sparsity: float, args: argparse.Namespace
) -> Iterator[dict[str, object]]:
    works = [work for work in workloads.workloads() if work.model == model]
    for kept in sorted({work.kept for work in works}, reverse=True):
        dense = workloads.prune(make(), sparsity, kept).requires_grad_(False)
        for work in works:
            if work.kept == kept:
                yield measure_workload(work, dense, sparsity, args)


def measure_workload(
    work: Workload, dense: nn.Module, sparsity: float, args: argparse.Namespace
) -> dict[str, object]:
    forms = contenders(work, dense, args)
    calls: common.Calls = {
        (form, i): lambda run=run, module=module: run(module)
        for form, module in forms.items()
        for i, run in enumerate(work.runs)
    }
    check(work.name, {form: calls[form, 0]() for form in forms})
    with peers.running(dense, args) if work.model == "encoder" else nullcontext({}) as others:
        calls.update({(name, 0): call for name, call in others.items()})
        best = common.least(calls, args.seconds, 3)
    times = {form: 1e3 * best[form, 0] for form in [*forms, *others]}
    if work.more > 1:
        times = {form: (1e3 * best[form, 1] - times[form]) / work.more for form in forms}
    return {"workload": work.name, "sparsity": sparsity, "milliseconds": times}


def tables(records: list[dict[str, object]]) -> str:
    forms = list(dict.fromkeys(form for record in records for form in record["milliseconds"]))
    lines = []
    for record in records:
        times = record["milliseconds"]
        cells = []
        for form in forms:
            if form not in times:
                cells.append("")
            elif form == "eager":
                cells.append(f"{times[form]:.3g}")
            else:
                cells.append(f"{times[form]:.3g} ({times['eager'] / times[form]:.2f})")
        lines.append([record["workload"], f"{100 * record['sparsity']:g} %", *cells])
    return tabulate(lines, ["", "zeros", *forms], tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(workloads.MODELS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each line of the table")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument("--deepsparse", metavar="PYTHON", help="of an environment with DeepSparse")
    parser.add_argument("--memory", action="store_true", help="of the encoder, too")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fxsparse.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(f"{common.cpu_name()}, torch {torch.__version__}, {fxsparse._C.isa()}, one thread\n")
    with torch.inference_mode():
        records = list(measure(args))
    print(tables(records))
    if args.memory:
        memory = list(peers.memory(args))
        print("\n" + tabulate(memory, headers="keys", tablefmt="github", floatfmt=".0f"))
        records += memory
    if args.json:
        with open(args.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
