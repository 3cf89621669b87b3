"""What ends up in the shared objects: each instruction set in its own functions, no Python in the core."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fxsparse

LIBRARY = Path(fxsparse.__file__).parent / "libfxsparse.so"
needs_objdump = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("objdump"),
    reason="needs objdump (binutils) on x86",
)


def objdump(*arguments: str) -> str:
    command = ["objdump", *arguments, LIBRARY]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def functions() -> dict[str, str]:
    """The code of each function by its name."""
    code = objdump("-d", "--no-show-raw-insn", "-C")
    parts = re.split(r"^[0-9a-f]+ <(.*)>:$", code, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@needs_objdump
def test_wide_registers_are_used_by_their_own_kernels_alone(functions):
    """Or the linker has merged two objects' functions, and older CPUs run into them."""
    assert any("%zmm" in code for code in functions.values())
    for name, code in functions.items():
        if re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|\{%k\d\}", code):
            assert "avx512" in name
        if re.search(r"%ymm|\bv[a-z0-9]+ .*%xmm", code):
            assert "avx2" in name or "avx512" in name


@needs_objdump
def test_the_core_does_not_need_python():
    needed = re.findall(r"NEEDED\s+(\S+)", objdump("-p"))
    assert needed and not any("python" in name for name in needed)
    assert not re.search(r"\bPy[A-Z_]\w+", objdump("-T"))
