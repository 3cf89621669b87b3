"""Builds the compiled core with ninja: libfxsparse.so (no Python in it) and the module _C.

Metadata is in pyproject.toml. setuptools compiles one file at a time and knows no flags by file;
the kernels need their own instruction sets each and change often, so ninja does it.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
KERNEL = ROOT / "kernel"
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())

# Files of kernel/isa by the end of their name: the machine that compiles them and their flags.
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# g++ 12 warns 490 times of its own AVX-512 headers. clang does not know that warning.
QUIET = ["-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
ISA_FLAGS = {
    "avx2": ("x86_64", AVX2),
    "avx512": ("x86_64", [*AVX512, *QUIET]),
    "neon": ("aarch64", []),
}
FLAGS = [
    *["-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"],
    # Kernels say where they want a fused multiply-add; contraction elsewhere would let two paths
    # of the same sum differ.
    "-ffp-contract=off",
]


def torch_folder() -> Path:
    """The installed torch, whose headers and library the operators are built with."""
    order = (
        "Install torch first, then fxsparse without build isolation:\n"
        "    pip install torch\n"
        '    pip install "setuptools>=77" pybind11 ninja\n'
        "    pip install --no-build-isolation ."
    )
    try:
        import torch
    except ImportError:
        raise SystemExit(f"fxsparse needs torch to build, and finds none. {order}") from None
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < (2, 10):
        raise SystemExit(f"fxsparse needs torch 2.10 or newer, found {torch.__version__}. {order}")
    return Path(torch.__file__).parent


def isa_flags(source: Path) -> list[str] | None:
    """Extra flags of a source file; None where it is not for this machine."""
    machine, flags = ISA_FLAGS.get(source.stem.rsplit("_", 1)[-1], (MACHINE, []))
    return flags if machine == MACHINE else None


def write_ninja(build: Path, module: str) -> None:
    import pybind11
    from ninja import ninja_syntax

    def quote(*words: object) -> str:
        """Words of a command as build.ninja spells them: for the shell, then for ninja."""
        return ninja_syntax.escape(shlex.join(map(str, words)))

    torch = torch_folder()
    includes = {
        "module.cpp": [pybind11.get_include(), sysconfig.get_paths()["include"]],
        "torch_ops.cpp": [torch / "include"],
        "torch_fused.cpp": [torch / "include"],
    }
    with open(build / "build.ninja", "w") as file:
        n = ninja_syntax.Writer(file)
        n.variable("cxx", os.environ.get("CXX", "c++"))
        n.rule(
            "compile",
            "$cxx -MMD -MF $out.d $flags $extra -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
            description="compile $in",
        )
        n.rule("link", "$cxx -shared -pthread $in -o $out $extra", description="link $out")
        core, binding = [], []
        for source in sorted(KERNEL.rglob("*.cpp")):
            extra = isa_flags(source)
            if extra is None:
                continue
            # torch's headers are not ours to warn about: -isystem.
            for path in includes.get(source.name, []):
                extra = [*extra, "-isystem", path]
            target = str(source.relative_to(KERNEL).with_suffix(".o"))
            flags = " ".join([quote(*FLAGS, f"-I{KERNEL}"), os.environ.get("CXXFLAGS", "")])
            variables = {"flags": flags, "extra": quote(*extra)}
            n.build(target, "compile", str(source), variables=variables)
            (binding if source.name == "module.cpp" else core).append(target)
        libraries = quote(f"-L{torch / 'lib'}", "-ltorch_cpu", "-Wl,--as-needed")
        n.build("libfxsparse.so", "link", core, variables={"extra": libraries})
        n.build(
            module,
            "link",
            [*binding, "libfxsparse.so"],
            variables={"extra": quote("-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined")},
        )


class NinjaBuild(build_ext):
    """Builds both shared objects in build/ and copies them to where setuptools wants them."""

    def run(self) -> None:
        import ninja

        module = Path(self.get_ext_filename("_C")).name
        build = ROOT / "build" / f"{MACHINE}-{sys.implementation.cache_tag}"
        build.mkdir(parents=True, exist_ok=True)
        write_ninja(build, module)
        subprocess.run([Path(ninja.BIN_DIR) / "ninja", "-C", build], check=True)
        for output in self.get_outputs():
            Path(output).parent.mkdir(parents=True, exist_ok=True)
            # A new file, not new bytes in a file that a running process has mapped.
            Path(output).unlink(missing_ok=True)
            shutil.copy2(build / Path(output).name, output)

    def get_outputs(self) -> list[str]:
        inplace = self.inplace or getattr(self, "editable_mode", False)
        folder = ROOT / "fxsparse" if inplace else Path(self.build_lib) / "fxsparse"
        module = Path(self.get_ext_filename("_C")).name
        return [str(folder / name) for name in ("libfxsparse.so", module)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


# An extension, so that wheels are for one platform; its files are named for the sdist's sake.
FILES = [str(path.relative_to(ROOT)) for path in sorted(KERNEL.rglob("*.*"))]
setup(
    ext_modules=[Extension("fxsparse._C", sources=[], depends=FILES)],
    cmdclass={"build_ext": NinjaBuild},
)
