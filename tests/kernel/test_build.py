"""The build from a folder and with a torch whose paths have to be quoted."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_support import KERNEL_SOURCE

ROOT = KERNEL_SOURCE.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").is_file(), reason="needs the sources of the package"
)

# Notes its arguments, one a line, and makes an empty output.
COMPILER = """#!/bin/sh
for word; do
  echo "$word" >> {log}
  [ "$last" = -o ] && : > "$word"
  last=$word
done
exit 0
"""


def test_paths_with_spaces_and_quotes(tmp_path):
    tree, site, log = tmp_path / "some one's clone", tmp_path / "a venv", tmp_path / "log"
    shutil.copytree(KERNEL_SOURCE, tree / "kernel")
    shutil.copy(ROOT / "setup.py", tree)
    site.mkdir()
    (site / "torch").symlink_to(Path(torch.__file__).parent)
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=shlex.quote(str(log))))
    compiler.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(site), "CXX": shlex.quote(str(compiler))}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"], cwd=tree, env=environment, check=True
    )
    words = log.read_text().splitlines()
    assert f"-I{tree / 'kernel'}" in words
    assert str(tree / "kernel/op/linear.cpp") in words
    assert str(site / "torch/include") in words
    assert f"-L{site / 'torch/lib'}" in words
    assert "-Wl,-rpath,$ORIGIN" in words
