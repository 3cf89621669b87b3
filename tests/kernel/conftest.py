"""Puts this folder's helpers on the path of its tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def num_threads():
    """Sets the pool's size for one test."""
    from fxsparse import _C

    before = _C.get_num_threads()
    yield _C.set_num_threads
    _C.set_num_threads(before)
