"""The core without torch or Python, for instruction sets that this CPU may not have too.

`native/` tests every format, kernel and value type; here it is built for another CPU and emulated:
AVX-512 under SIMDe, NEON under qemu. `make sanitize` runs it under the sanitizers.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_support import KERNEL_SOURCE, TESTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (KERNEL_SOURCE / "isa").is_dir(), reason="needs the sources of the kernels"
    ),
]
X86 = platform.machine() == "x86_64"
SECONDS = ["--seconds", "8"]


def needs_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}")
    return path


def build(name: str, **variables: str) -> Path:
    """Only what changed since the last time is compiled."""
    folder = KERNEL_SOURCE.parent / "build/native/emulated" / name
    words = [
        f"{key}={value}" for key, value in {"OUT": folder, "FLAGS": "-O1", **variables}.items()
    ]
    jobs = len(os.sched_getaffinity(0))
    command = [needs_program("make"), f"-j{jobs}", "-s", "-C", TESTS / "native", *words]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder / "native"


def run(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def check(*command: object) -> None:
    result = run(*command)
    good = result.returncode == 0 and result.stdout.endswith("\n0 failures\n")
    assert good, f"exit code {result.returncode}\n{result.stdout}{result.stderr}"


@pytest.fixture(scope="module")
def emulated_avx512() -> Path:
    if not X86:
        pytest.skip("SIMDe's half floats need an x86")
    needs_program(os.environ.get("CXX", "g++"))
    if not Path("/usr/include/simde/x86/avx512.h").is_file():
        pytest.skip("needs SIMDe's headers (Debian: libsimde-dev)")
    return build("simde", EMULATE_AVX512="yes")


def test_avx512(emulated_avx512):
    check(emulated_avx512, "--isa", "avx512", *SECONDS)


def test_neon():
    if platform.machine() == "aarch64":
        check(build("aarch64"), "--isa", "neon", *SECONDS)
        return
    compiler = needs_program("aarch64-linux-gnu-g++")
    emulator = needs_program("qemu-aarch64-static")
    program = build("aarch64", CXX=compiler, MACHINE="aarch64", LINK_FLAGS="-static")
    check(emulator, program, "--isa", "neon", *SECONDS)


@pytest.mark.parametrize(
    "sabotage, text",
    [
        ("sum", "forward [1, 1]: expected"),
        ("threads", "three threads give other bits than one"),
        ("gap", "wrote between or beside the rows of y"),
        ("beside", "wrote between or beside the rows of y"),
        ("bits", "forward ["),
        ("read", "Segmentation fault"),
    ],
)
def test_what_is_wrong_is_noticed(emulated_avx512, sabotage, text):
    """Each mistake that the program can make on purpose fails the test it is meant for."""
    result = run(emulated_avx512, "--isa", "generic", "--case", "0", "--sabotage", sabotage)
    assert result.returncode != 0
    assert "FAILED" in result.stdout and text in result.stdout
