"""Log-prob of stored steps, forward: ours fused on CUDA (the torch reference on CPU), the plain formula, compiled."""

import torch

from flowgrpo_bench.case import BenchCase, Workload
from flowgrpo_bench.measure import rotation
from flowgrpo_bench.plain import plain_logp

TOKENS = {"384x384": 576, "1024x1024": 4096}
STEPS = 3
SIZES = {
    f"{B} x {STEPS} steps, {resolution}": {"rows": B * STEPS, "tokens": tokens}
    for resolution, tokens in TOKENS.items()
    for B in (1, 8, 64, 256)
}
CPU_SIZES = {f"{B} x {STEPS} steps, 384x384": {"rows": B * STEPS, "tokens": 576} for B in (1, 8)}
SMOKE_SIZES = {"2 x 3 steps, 64x64": {"rows": 6, "tokens": 16}}
# Nats per element; the plain formula in float32 is off by as much.
GATE_ATOL = 5e-6


def setup(device: str, *, rows: int, tokens: int) -> Workload:
    """bf16 latents and velocity, as from a model in bf16, no gradient."""
    from flowgrpo_math.testing import draw_step
    from flowgrpo_math.transition import Transition, transition_logp

    bytes_moved = 3 * rows * tokens * 64 * 2
    drawn = [
        draw_step(rows, tokens, dtype=torch.bfloat16, device=device, seed=seed)
        for seed in range(rotation(bytes_moved, device))
    ]
    t = drawn[0].t.to(device)
    compiled = torch.compile(plain_logp, dynamic=False) if device == "cuda" else None
    if device == "cuda":
        from flowgrpo_math.kernels import transition_logp as ours
    else:
        ours = transition_logp

    def gate() -> None:
        x, velocity, _, x_next, exact_t = drawn[0]
        few = slice(0, 8)  # in float64 the largest size would not fit beside the rest
        exact = (tensor[few].double() for tensor in (x, velocity, x_next))
        expected = transition_logp(*exact, Transition(*(c[few] for c in exact_t)))
        for call in (ours, plain_logp, *([compiled] if compiled else [])):
            torch.testing.assert_close(call(x, velocity, x_next, t)[few].double(), expected, atol=GATE_ATOL, rtol=0)

    return Workload(
        ours=ours,
        rivals={"eager": plain_logp} | ({"compiled": compiled} if compiled else {}),
        inputs=[(d.x, d.velocity, d.x_next, t) for d in drawn],
        gate=gate,
        bytes_moved=bytes_moved,
        operations=7 * rows * tokens * 64,
    )


CASE = BenchCase(
    name="transition_logp",
    about="log-prob of stored denoising steps, forward",
    setup=setup,
    sizes=SIZES,
    cpu_sizes=CPU_SIZES,
    smoke=SMOKE_SIZES,
)
