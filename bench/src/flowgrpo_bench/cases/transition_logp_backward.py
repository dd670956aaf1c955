"""Log-prob of stored steps, forward and backward to the velocity, through autograd; variants as `transition_logp`."""

from collections.abc import Callable

import torch
from torch import Tensor

from flowgrpo_bench.case import BenchCase, Workload
from flowgrpo_bench.cases.transition_logp import CPU_SIZES, SIZES, SMOKE_SIZES
from flowgrpo_bench.measure import rotation
from flowgrpo_bench.plain import plain_logp

# Relative, of the gradient vector: one rounding to bf16 is 2^-9 at most, its root mean square 1.7e-3.
GATE_RTOL = 4e-3


def setup(device: str, *, rows: int, tokens: int) -> Workload:
    """bf16 latents and velocity; the gradient of logp differs from row to row, as advantages do."""
    from flowgrpo_math.testing import draw_step
    from flowgrpo_math.transition import Transition, transition_logp

    # Forward reads three tensors; backward reads them again and writes one gradient.
    bytes_moved = 7 * rows * tokens * 64 * 2
    drawn = [
        draw_step(rows, tokens, dtype=torch.bfloat16, device=device, seed=seed)
        for seed in range(rotation(bytes_moved, device))
    ]
    t = drawn[0].t.to(device)
    grad_B = torch.linspace(-1.0, 1.0, rows, device=device) + 0.01
    for d in drawn:
        d.velocity.requires_grad_()
    if device == "cuda":
        from flowgrpo_math.kernels import transition_logp as logp
    else:
        logp = transition_logp

    def with_gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, velocity: Tensor, x_next: Tensor) -> Tensor:
            return torch.autograd.grad(function(x, velocity, x_next, t), velocity, grad_B)[0]

        return call

    ours = with_gradient(logp)
    rivals = {"eager": with_gradient(plain_logp)}
    if device == "cuda":
        rivals["compiled"] = with_gradient(torch.compile(plain_logp, dynamic=False))

    def gate() -> None:
        x, velocity, _, x_next, exact_t = drawn[0]
        few = slice(0, 8)  # in float64 the largest size would not fit beside the rest
        exact_velocity = velocity.detach()[few].double().requires_grad_()
        logp_few = transition_logp(
            x[few].double(), exact_velocity, x_next[few].double(), Transition(*(c[few] for c in exact_t))
        )
        (expected,) = torch.autograd.grad(logp_few, exact_velocity, grad_B[few].double())
        for name, call in {"ours": ours, **rivals}.items():
            off = (call(x, velocity, x_next)[few].double() - expected).norm() / expected.norm()
            assert off < GATE_RTOL, f"{name}'s gradient is off by {off:.2e}"

    return Workload(
        ours=ours,
        rivals=rivals,
        inputs=[(d.x, d.velocity, d.x_next) for d in drawn],
        gate=gate,
        bytes_moved=bytes_moved,
        operations=17 * rows * tokens * 64,
    )


CASE = BenchCase(
    name="transition_logp_backward",
    about="log-prob of stored denoising steps, forward and backward",
    setup=setup,
    sizes=SIZES,
    cpu_sizes=CPU_SIZES,
    smoke=SMOKE_SIZES,
)
