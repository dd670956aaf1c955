"""For tests and benchmarks of this package and of those that build on it: inputs as training sees them, and kernels
under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_math.transition import SdeType, Transition, transition, transition_sample

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton, once imported, interprets kernels on the CPU in this process."""
_empty = torch.empty


def run_under_interpreter(folder: Path) -> None:
    """Runs the tests of `folder` in a process of its own: the choice is one a process. AssertionError if any fails."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "deselected" not in done.stdout


def empty_of_nan(*size: Any, **options: Any) -> Tensor:
    """In place of `torch.empty`: memory that a kernel should write holds NaN before it does."""
    tensor = _empty(*size, **options)
    return tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor


class DrawnStep(NamedTuple):
    """A latent, a velocity, noise and the x_next that they give, all [B, P, C], and their step."""

    x: Tensor
    velocity: Tensor
    noise: Tensor
    x_next: Tensor
    t: Transition


def draw_step(
    B: int,
    P: int,
    C: int = 64,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    sde_type: SdeType = "sde",
    eta: float = 0.7,
    seed: int = 0,
) -> DrawnStep:
    """B candidates of P tokens of C channels, each at a sigma of its own between 0.9 and 0.3.

    x_next is drawn from the step, as in training. An x_next independent of x would make z, and with it every
    rounding error, many times larger than it ever is, and tests would loosen their tolerance for nothing.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x, velocity, noise = (
        torch.randn(B, P, C, device=device, generator=generator, dtype=torch.float32).to(dtype) for _ in range(3)
    )
    sigma = torch.linspace(0.9, 0.3, B, dtype=torch.float64)
    t = transition(sde_type, sigma, sigma - 0.05, eta=eta)
    return DrawnStep(x, velocity, noise, transition_sample(x, velocity, noise, t).to(dtype), t)
