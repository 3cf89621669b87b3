"""Kernels for instruction sets that this CPU may not have: compiled for it and emulated.

`cross.cpp` compares them with the generic ones. AVX-512 runs under SIMDe, NEON under qemu.
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
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", f"-I{KERNEL_SOURCE}"]


def needs_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}")
    return path


def build(compiler: str, isa: str, folder: Path, *flags: str) -> Path:
    program = folder / f"cross_{isa}"
    sources = [TESTS / "cross.cpp", *(KERNEL_SOURCE / f"isa/csr_{i}.cpp" for i in ("generic", isa))]
    command = [compiler, *FLAGS, f"-DFXSPARSE_KERNELS=csr_{isa}", *flags, *sources, "-o", program]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return program


def check(*command: object) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("0 failures\n"), (
        result.stdout + result.stderr
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="SIMDe's half floats need an x86")
def test_avx512(tmp_path):
    compiler = needs_program(os.environ.get("CXX", "g++"))
    if not Path("/usr/include/simde/x86/avx512.h").is_file():
        pytest.skip("needs SIMDe's headers (Debian: libsimde-dev)")
    header = f'-DFXSPARSE_AVX512_HEADER="{TESTS / "emulated_avx512.h"}"'
    check(build(compiler, "avx512", tmp_path, "-Wno-psabi", header))


def test_neon(tmp_path):
    if platform.machine() == "aarch64":
        check(build(needs_program("g++"), "neon", tmp_path))
        return
    compiler = needs_program("aarch64-linux-gnu-g++")
    emulator = needs_program("qemu-aarch64-static")
    check(emulator, build(compiler, "neon", tmp_path, "-static"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86")
def test_the_comparison_can_fail(tmp_path):
    """A kernel that is wrong is noticed: the generic one with another's sums."""
    compiler = needs_program(os.environ.get("CXX", "g++"))
    broken = tmp_path / "vector_generic.h"
    source = (KERNEL_SOURCE / "isa/vector_generic.h").read_text()
    changed = source.replace("a.v * b.v + c.v", "a.v * b.v - c.v")
    assert changed != source
    broken.write_text(changed.replace("generic", "broken"))
    kernel = tmp_path / "csr_broken.cpp"
    kernel.write_text(
        f'#define FXSPARSE_ISA_NAMESPACE broken\n#include "{broken}"\n#include "isa/csr_kernel.h"\n'
    )
    program = tmp_path / "cross"
    sources = [TESTS / "cross.cpp", KERNEL_SOURCE / "isa/csr_generic.cpp", kernel]
    command = [compiler, *FLAGS, "-DFXSPARSE_KERNELS=csr_broken", *sources, "-o", program]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 1 and "FAILED forward, float32" in result.stdout
