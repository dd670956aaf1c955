"""Triton versions of `flowgrpo_math.transition`'s log-prob and sampling step: one launch each way.

Nothing chooses them silently: call them by name, or pass `backend="triton"` to `replay_transition_logp`. They need
Triton (part of torch's CUDA builds on Linux) and CUDA tensors; with `TRITON_INTERPRET=1` in the environment before
Triton is imported they run, slowly, on the CPU. The torch functions of the same formulas are their reference.
"""

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"flowgrpo_math.kernels needs Triton, which does not import here ({error}): install a CUDA build of torch, "
        'or stay with the torch functions of flowgrpo_math.transition (backend="torch")'
    ) from error

from flowgrpo_math.kernels.transition_logp import transition_logp
from flowgrpo_math.kernels.transition_sample_logp import transition_sample_logp

__all__ = ["transition_logp", "transition_sample_logp"]
