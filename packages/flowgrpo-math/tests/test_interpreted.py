"""Runs `kernels/` under Triton's interpreter."""

from pathlib import Path

import pytest
from flowgrpo_math.testing import run_under_interpreter


@pytest.mark.timeout(600)  # 45 s of processor time; several minutes on a machine that others keep busy
def test_kernels_pass_their_tests_under_the_interpreter():
    run_under_interpreter(Path(__file__).parent / "kernels")
