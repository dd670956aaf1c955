"""The sampler's step and its log-prob in one pass; on the CPU, the two reference functions one after the other."""

from collections.abc import Callable
from typing import Any

import torch

from flowgrpo_bench.case import BenchCase, Workload
from flowgrpo_bench.measure import rotation
from flowgrpo_bench.plain import plain_sample_logp

SIZES = {
    f"{B}, {resolution}": {"rows": B, "tokens": tokens}
    for resolution, tokens in {"384x384": 576, "1024x1024": 4096}.items()
    for B in (1, 16, 256)
}
LOGP_ATOL = 5e-6  # nats per element
SAMPLE_ATOL = 5e-6  # of a latent near 1, in float32


def setup(device: str, *, rows: int, tokens: int) -> Workload:
    """float32 latents and noise, bf16 velocity: what an engine holds that stores its trajectory in float32."""
    from flowgrpo_math.testing import draw_step
    from flowgrpo_math.transition import transition_logp, transition_sample

    elements = rows * tokens * 64
    bytes_moved = elements * (4 + 2 + 4 + 4)
    drawn = [draw_step(rows, tokens, device=device, seed=seed) for seed in range(rotation(bytes_moved, device))]
    inputs = [(d.x, d.velocity.bfloat16(), d.noise, drawn[0].t.to(device)) for d in drawn]

    def reference(x, velocity, noise, t):
        x_next = transition_sample(x, velocity, noise, t)
        return x_next, transition_logp(x, velocity, x_next, t)

    ours: Callable[..., Any] = reference
    rivals: dict[str, Callable[..., Any]] = {"eager": plain_sample_logp}
    if device == "cuda":
        from flowgrpo_math.kernels import transition_sample_logp

        ours = transition_sample_logp
        rivals["compiled"] = torch.compile(plain_sample_logp, dynamic=False)

    def gate() -> None:
        x, velocity, noise, t = inputs[0]
        expected, _ = reference(x.double(), velocity.double(), noise.double(), drawn[0].t)
        for call in (ours, *rivals.values()):
            x_next, logp = call(x, velocity, noise, t)
            torch.testing.assert_close(x_next.double(), expected, atol=SAMPLE_ATOL, rtol=0)
            of_stored = transition_logp(x.double(), velocity.double(), x_next.double(), drawn[0].t)
            torch.testing.assert_close(logp.double(), of_stored, atol=LOGP_ATOL, rtol=0)

    return Workload(
        ours=ours,
        rivals=rivals,
        inputs=inputs,
        gate=gate,
        bytes_moved=bytes_moved,
        operations=9 * elements,
    )


CASE = BenchCase(
    name="transition_sample_logp",
    about="one SDE sampling step with its log-prob",
    setup=setup,
    sizes=SIZES,
    cpu_sizes={"1, 384x384": {"rows": 1, "tokens": 576}, "8, 384x384": {"rows": 8, "tokens": 576}},
    smoke={"2, 64x64": {"rows": 2, "tokens": 16}},
)
