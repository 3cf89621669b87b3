"""Other engines, on the encoder: onnxruntime in this process, DeepSparse in one of another Python."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import common
import torch
import workloads
from torch import nn

SERVER = Path(__file__).with_name("deepsparse_server.py")


@contextmanager
def running(
    model: nn.Module, args: argparse.Namespace
) -> Iterator[dict[str, Callable[[], object]]]:
    """What runs the encoder with other engines, by their names; each is checked against torch.

    A call of DeepSparse is a line to its process and back, some tens of microseconds.
    """
    calls: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = _onnx_file(model, Path(folder))
        if file is None:
            yield calls
            return
        x = workloads.encoder_input()
        expected = model(x)
        calls["onnxruntime"] = _onnxruntime(file, x)
        _check("onnxruntime", torch.from_numpy(calls["onnxruntime"]()[0]), expected)
        if not args.deepsparse:
            yield calls
            return
        with _Server(args.deepsparse, file, x) as server:
            calls["DeepSparse"] = server.run
            _check("DeepSparse", server.output(), expected)
            yield calls


def _check(name: str, output: torch.Tensor, expected: torch.Tensor) -> None:
    if not (output - expected).abs().max() <= 1e-3 * expected.abs().max():
        raise SystemExit(f"{name} gives something else than torch")


def _onnx_file(model: nn.Module, folder: Path) -> Path | None:
    try:
        import onnx
        import onnxruntime  # noqa: F401
    except ImportError as error:
        print(f"no peers: {error.name} is not installed", file=sys.stderr)
        return None
    file = folder / "model.onnx"
    x = (workloads.encoder_input(),)
    with torch.inference_mode(False):
        torch.onnx.export(model, x, file, opset_version=13, dynamo=False, input_names=["x"])
    written = onnx.load(file)
    written.ir_version = 8  # the newest that DeepSparse reads
    onnx.save(written, file)
    return file


def _onnxruntime(file: Path, x: torch.Tensor) -> Callable[[], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    array = x.numpy()
    return lambda: session.run(None, {"x": array})


class _Server:
    """DeepSparse in a process of another Python."""

    def __init__(self, python: str, file: Path, x: torch.Tensor) -> None:
        import numpy

        self.folder = file.parent
        numpy.save(self.folder / "x.npy", x.numpy())
        self.process = subprocess.Popen(
            [python, str(SERVER), str(file), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            text=True,
        )
        self.growth = self._answer()

    def _answer(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("DeepSparse has died; run its Python by hand to see why")
        return json.loads(line)

    def run(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._answer()

    def output(self) -> torch.Tensor:
        import numpy

        return torch.from_numpy(numpy.load(self.folder / "y.npy"))

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()


def memory(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Megabytes by which a process grows that loads the pruned encoder and runs it."""
    for sparsity in args.sparsity:
        record: dict[str, object] = {"encoder, zeros": f"{100 * sparsity:g} %"}
        model = workloads.prune(workloads.encoder(), sparsity).requires_grad_(False)
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.pt"
            torch.save(model.state_dict(), weights)
            for how in ("eager", "fxsparse"):
                command = [sys.executable, __file__, how, str(weights)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                record[f"{how}, MB"] = float(done.stdout.split()[-1])
            file = _onnx_file(model, Path(folder)) if args.deepsparse else None
            if file is not None:
                with _Server(args.deepsparse, file, workloads.encoder_input()) as server:
                    record["DeepSparse, MB"] = server.growth
        yield record


def grow(how: str, weights: str) -> float:
    """Megabytes by which this process grows: ``weights`` in an encoder, compiled or not, and run."""
    import fxsparse
    from fxsparse.memory import release_free_memory

    x = workloads.encoder_input()
    release_free_memory()
    before = common.resident_bytes()
    with torch.device("meta"):
        model = workloads.encoder()
    model.load_state_dict(torch.load(weights), assign=True)
    model.eval().requires_grad_(False)
    if how == "fxsparse":
        model = fxsparse.compile(model, inplace=True, threads=1, batch_hint=x.shape[1])
    for _ in range(3):
        model(x)
    release_free_memory()
    return (common.resident_bytes() - before) / 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        print(grow(*sys.argv[1:]))
