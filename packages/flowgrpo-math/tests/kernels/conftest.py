"""These tests run twice: on a GPU (marker `gpu`), and on the CPU under Triton's interpreter.

The interpreter is chosen when Triton is imported, for the whole process, so `test_interpreted.py` one folder up runs
this folder in a process of its own.
"""

from pathlib import Path

import pytest
import torch
from flowgrpo_math.kernels import _rows
from flowgrpo_math.testing import INTERPRETED, empty_of_nan

if INTERPRETED:
    # The interpreter takes some 20 ms for each block of each program: the same code, on rows sixteen times shorter.
    _rows.CHUNK, _rows.BLOCK = 512, 256


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if not INTERPRETED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device():
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that a kernel should write holds NaN before it does."""
    monkeypatch.setattr(torch, "empty", empty_of_nan)
