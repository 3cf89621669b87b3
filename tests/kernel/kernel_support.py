"""What the kernel tests share: packed weights as tensors, single kernels, the error bound."""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fxsparse import _C

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

FORMATS = _C.formats()
KERNELS = [kernel for kernel in _C.kernels() if kernel["usable"]]
KERNEL_IDS = ["-".join((k["format"], k["isa"], k["value"])) for k in KERNELS]

TESTS = Path(__file__).parent
KERNEL_SOURCE = TESTS.parent.parent / "kernel"


def dense_arguments(weight: torch.Tensor) -> tuple:
    return (weight.data_ptr(), *weight.shape, *weight.stride(), NAMES[weight.dtype])


def describe(weight: torch.Tensor, format: str = "csr", flags: int = 0) -> bytes:
    return _C.describe(*dense_arguments(weight), format, flags)


def pack(weight: torch.Tensor, format: str = "csr", flags: int = 0) -> torch.Tensor:
    header = describe(weight, format, flags)
    # Anything that pack leaves unwritten must show.
    packed = torch.full((_C.packed_bytes(header),), 0xA5, dtype=torch.uint8)
    _C.pack(*dense_arguments(weight), header, packed.data_ptr(), packed.numel())
    return packed


def validate(packed: torch.Tensor) -> None:
    _C.validate(packed.data_ptr(), packed.numel())


def unpack(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    _C.unpack(packed.data_ptr(), packed.numel(), out.data_ptr(), *out.stride())
    return out


def forward(
    isa: str,
    packed: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    rows = _C.header(packed.data_ptr(), packed.numel())["rows"]
    y = torch.full((len(x), rows), float("nan"), dtype=x.dtype)  # must all be overwritten
    assert x.stride(1) == 1 or x.shape[1] <= 1
    _C.run_kernel(
        isa,
        packed.data_ptr(),
        packed.numel(),
        x.data_ptr(),
        x.stride(0),
        len(x),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows,
        threads,
    )
    return y


def backward(isa: str, packed: torch.Tensor, grad: torch.Tensor, threads: int = 1) -> torch.Tensor:
    cols = _C.header(packed.data_ptr(), packed.numel())["cols"]
    out = torch.full((len(grad), cols), float("nan"), dtype=grad.dtype)
    _C.run_kernel_transposed(
        isa,
        packed.data_ptr(),
        packed.numel(),
        grad.data_ptr(),
        grad.stride(0),
        len(grad),
        out.data_ptr(),
        cols,
        threads,
    )
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def check_product(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """``got`` is x @ weight.T + bias up to what rounding explains, entry by entry.

    A sum of n products, in any order and with or without fused multiply-adds, is within
    ``(n + 2) * u * sum(|x * w|)`` (Higham, Accuracy and Stability, 3.1), u half a unit in the last
    place of the type that is computed in; storing it adds one u of the type that is stored. The
    oracle is the dense product in float64, whose own error doubles the bound for float64.
    """
    stored = torch.finfo(got.dtype)
    computed = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32)
    x64, w64 = x.double(), weight.double()
    expected, magnitude = x64 @ w64.T, x64.abs() @ w64.abs().T
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    terms = weight.shape[1] + 2
    bound = terms * computed.eps * magnitude + stored.eps / 2 * expected.abs() + stored.tiny
    error = (got.double() - expected).abs()
    assert got.shape == expected.shape
    worst = (error - bound).max() if error.numel() else torch.tensor(-1.0)
    assert worst <= 0, f"off by up to {worst.item():.3g} more than rounding explains"


# Importing torch takes more than a second: one process does it and forks for each script. The fork
# is as good as a new process, as nothing has been called in it, and ends as one.
_SERVER = f"""
import json, os, signal, sys
sys.path.insert(0, {str(TESTS)!r})
import torch, fxsparse
from fxsparse import _C
from kernel_support import *
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(request[name], os.O_WRONLY), number)
os.environ.update(request["environment"])
signal.alarm(request["timeout"])
exec(request["script"])
"""


@functools.cache
def _server() -> subprocess.Popen:
    command = [sys.executable, "-c", _SERVER]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)


def run_script(script: str, timeout: int = 60, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python code in a process of its own, which has imported everything of this file."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = {
            "script": script,
            "timeout": timeout,
            "environment": environment,
            "stdout": out.name,
            "stderr": err.name,
        }
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(script, code, out.read(), err.read())


def run_ok(script: str, timeout: int = 60, **environment: str) -> str:
    result = run_script(script, timeout, **environment)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stderr}"
    return result.stdout.strip()
