"""Runs `kernels/` under Triton's interpreter, in a process of its own: the choice is one per process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)  # several minutes on a machine that others keep busy
def test_kernels_pass_their_tests_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "kernels")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "deselected" not in done.stdout
