"""Writes what setup.py compiles the files of kernel/isa with as variables of make.

setup.py builds when it is run or imported, so its lists of flags are read as text. For each
instruction set FLAGS_<isa>, and in OTHERS those that the machine cannot have.
"""

import ast
import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def isa_flags() -> dict[str, tuple[str, list[str]]]:
    """ISA_FLAGS of setup.py: the machine and the flags of each instruction set."""
    values: dict = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        # Of the assignments, those that are lists of words and need nothing else.
        if isinstance(node, ast.Assign):
            with contextlib.suppress(NameError):
                exec(compile(ast.Module([node], []), "setup.py", "exec"), values)
    return values["ISA_FLAGS"]


def main(machine: str) -> None:
    flags = isa_flags()
    print("OTHERS :=", *(isa for isa, (its, _) in flags.items() if its != machine))
    for isa, (_, words) in flags.items():
        # -O1 and -O2 have g++ warn of its own AVX-512 headers in one more way.
        print(f"FLAGS_{isa} :=", *words, "-Wno-uninitialized")


if __name__ == "__main__":
    main(sys.argv[1])
