"""The thread pool: cost of a job, what a second thread brings, and life next to torch's threads.

    python benchmarks/threads.py --threads 2

Everything is timed in one process, contenders in turn, a call at a time: least / median / 90th
percentile in microseconds. On a machine that others use, only the least says what the code can do.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate

import fxsparse
from fxsparse import _C, ops
from fxsparse.packing import pack


def clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def series(call: Callable[[], object], repeats: int, pause: float) -> list[float]:
    call()
    times = []
    for _ in range(repeats):
        end = time.perf_counter() + pause
        while time.perf_counter() < end:  # as another operator would: not asleep
            pass
        times.append(clock(call))
    return times


def three(times: list[float]) -> list[float]:
    times = sorted(times)
    return [times[int(share * len(times))] for share in (0, 0.5, 0.9)]


def text(times: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in three(times))


@dataclass
class Layer:
    """A sparse and a dense linear of one shape, on one input."""

    rows: int
    cols: int
    batch: int
    zeros: float
    format: str = "csr"

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(self.rows, self.cols, generator=generator)
        self.weight = weight.where(
            torch.rand(weight.shape, generator=generator) >= self.zeros, torch.tensor(0.0)
        )
        self.packed = pack(self.weight, format=self.format)
        self.bias = torch.randn(self.rows)
        self.x = torch.randn(self.batch, self.cols)

    def sparse(self, threads: int = 0, more: bool = False) -> torch.Tensor:
        shape = (self.rows, self.cols)
        return ops.linear(self.x, self.packed, self.bias, *shape, torch.float32, threads, more)

    def dense(self) -> torch.Tensor:
        return F.linear(self.x, self.weight, self.bias)


def dispatch(args: argparse.Namespace) -> None:
    """Jobs without work; a parked worker is woken by a system call."""
    many = 1000
    spinning, parked = [], []
    for _ in range(args.repeats):
        spinning.append(clock(lambda: _C.run_nothing(args.threads, True, many)) / many)
        time.sleep(0.001)
        parked.append(clock(lambda: _C.run_nothing(args.threads, False, 1)))
    print(f"empty job, workers spinning  {text(spinning)}")
    print(f"empty job, workers parked    {text(parked)}")


def idle() -> None:
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1)
    print(f"CPU time of an idle second   {(time.process_time() - before) * 1e6:.0f}\n")


def speedup(args: argparse.Namespace) -> None:
    """One thread and all of them: called at once with ``more``, and after a pause without it."""
    table = []
    for shape in args.shapes:
        for batch in args.batch:
            layer = Layer(*map(int, shape.split("x")), batch, args.zeros)
            cells: list[object] = [shape, batch]
            for pause in (0.0, 1e-4):
                one, all_threads = [], []
                for _ in range(args.rounds):
                    one += series(lambda: layer.sparse(1), args.repeats, pause)  # noqa: B023
                    all_threads += series(
                        lambda: layer.sparse(args.threads, not pause),  # noqa: B023
                        args.repeats,
                        pause,
                    )
                ratios = [f"{a / b:.2f}" for a, b in zip(three(one), three(all_threads))]
                cells += [text(one), text(all_threads), " / ".join(ratios[:2])]
            table.append(cells)
    headers = ["1 thread", f"{args.threads} threads", "speed-up"]
    paused = [f"{name}, after a pause" for name in headers]
    print(tabulate(table, ["shape", "batch", *headers, *paused], tablefmt="github"))


def bandwidth(args: argparse.Namespace) -> None:
    """A single row against what memory, or the cache that holds the weight, gives: GB/s of a plain
    sum over as many bytes, and of the multiplies. No packed form can go faster than the first."""
    table = []
    for shape in args.shapes:
        layer = Layer(*map(int, shape.split("x")), 1, args.zeros, "tiles")
        read = torch.ones(layer.packed.numel() // 4)
        cells: list[object] = [shape, f"{layer.packed.numel() / 1e6:.1f}"]
        for contender, tensor in (
            (read.sum, read),
            (layer.sparse, layer.packed),
            (layer.dense, layer.weight),
        ):
            for threads in (1, args.threads):
                torch.set_num_threads(threads)
                fxsparse.set_num_threads(threads)
                least = min(series(contender, args.repeats * args.rounds, 0))
                cells.append(f"{tensor.numel() * tensor.element_size() / least / 1e3:.0f}")
        table.append(cells)
    fxsparse.set_num_threads(args.threads)
    torch.set_num_threads(1)
    names = [
        f"{name}, {threads} threads"
        for name in ("sum", "tiles", "dense")
        for threads in (1, args.threads)
    ]
    print("\nGB/s at batch 1")
    print(tabulate(table, ["shape", "MB packed", *names], tablefmt="github"))


def alternate(args: argparse.Namespace) -> None:
    """Dense layers on torch's threads and sparse ones on ours: each alone, and by turns."""
    torch.set_num_threads(args.threads)
    table = []
    for shape in args.shapes:
        layer = Layer(*map(int, shape.split("x")), args.alternate_batch, args.zeros)
        times: dict[str, list[float]] = {}

        def note(
            name: str, call: Callable[[], object], times: dict[str, list[float]] = times
        ) -> None:
            times.setdefault(name, []).append(clock(call))

        for _ in range(args.rounds):
            for _ in range(args.repeats):
                note("dense alone", layer.dense)
            time.sleep(0.05)  # until torch's threads have stopped spinning
            for _ in range(args.repeats):
                note("sparse alone", lambda: layer.sparse(args.threads, True))  # noqa: B023
            for name, threads, more in (
                ("by turns, sparse on one thread", 1, False),
                ("by turns", args.threads, False),
                ("by turns, workers awake in vain", args.threads, True),
            ):
                for _ in range(args.repeats):
                    note(f"dense {name}", layer.dense)
                    note(
                        f"sparse {name}",
                        lambda: layer.sparse(threads, more),  # noqa: B023
                    )
        table += [[shape, name, text(value)] for name, value in times.items()]
    print(f"\nbatch {args.alternate_batch}, torch threads {args.threads}")
    print(tabulate(table, ["shape", "", "us"], tablefmt="github"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", default=["768x768", "3072x768", "768x3072", "4096x4096"]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--alternate-batch", type=int, default=16)
    parser.add_argument("--zeros", type=float, default=0.9)
    parser.add_argument("--threads", type=int, default=2, help="of fxsparse and of torch")
    parser.add_argument("--repeats", type=int, default=50, help="calls in a row")
    parser.add_argument("--rounds", type=int, default=5, help="of all contenders in turn")
    args = parser.parse_args()
    fxsparse.set_num_threads(args.threads)
    torch.set_num_threads(1)
    print(f"{_C.isa()}, {args.threads} threads, torch {torch.__version__}; least / median / p90 us")
    with torch.inference_mode():
        dispatch(args)
        idle()
        speedup(args)
        bandwidth(args)
        alternate(args)


if __name__ == "__main__":
    main()
