"""What both examples share: interleaved timing, resident memory, and the closing table."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tabulate import tabulate

import fxsparse

Row = tuple[str, float, float, str]
"""What was measured, its dense and its sparse value, and a format such as ``"{:.1f} ms"``."""


def package_folder(module: str, install: str) -> Path:
    """The folder of an installed package, found without importing it.

    Exits with the ``pip install`` command where the package is missing.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{module} is not installed; install it with: pip install {install}")
    return Path(spec.origin).parent


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Run with ``n`` threads in both pools, torch's and fxsparse's."""
    before = torch.get_num_threads(), fxsparse.get_num_threads()
    torch.set_num_threads(n)
    fxsparse.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        fxsparse.set_num_threads(before[1])


def milliseconds(
    run: Callable[[torch.nn.Module], object], models: Iterable[torch.nn.Module], seconds: float
) -> list[float]:
    """The shortest time of ``run(model)`` for each of ``models``, tried for about ``seconds``.

    The models take turns, so that what else the machine does falls on all of them alike.
    """
    models = list(models)
    best = [float("inf")] * len(models)
    for model in models:
        run(model)  # warms up
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or float("inf") in best:
        for i, model in enumerate(models):
            start = time.perf_counter()
            run(model)
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory now; None where there is no /proc to say."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


def comparison(rows: list[Row]) -> str:
    """The closing table: dense against sparse, with ratios."""
    cells = [
        (what, form.format(dense), form.format(sparse), f"{dense / sparse:.2f}x")
        for what, dense, sparse, form in rows
    ]
    return tabulate(
        cells,
        ("", "dense", "sparse", "dense/sparse"),
        colalign=("left", "right", "right", "right"),
        disable_numparse=True,
    )
