"""These tests run twice: on a GPU (marker `gpu`), and on the CPU under Triton's interpreter.

The interpreter is chosen when Triton is imported, for the whole process, so `test_interpreted.py` one folder up runs
this folder in a process of its own.
"""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if not INTERPRETED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device():
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def poisoned():
    """Memory that a kernel should write holds NaN before it does."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
