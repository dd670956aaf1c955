"""The clipped loss of one micro-batch with all its metrics, against the bare loss: what the metrics cost."""

import torch
from torch import Tensor

from flowgrpo_bench.case import BenchCase, Workload


def bare_loss(logp: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    """The formula without checks and metrics."""
    ratio = torch.exp(logp - anchor)
    advantages = advantages[:, None]
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean()


def setup(device: str, *, B: int, S: int) -> Workload:
    """B candidates, S steps, ratios around the clip bounds."""
    from flowgrpo_math import grpo_clip_loss

    generator = torch.Generator(device).manual_seed(0)
    logp = torch.randn(B, S, device=device, generator=generator)
    anchor = logp + 2e-4 * torch.randn(B, S, device=device, generator=generator)
    advantages = torch.randn(B, device=device, generator=generator)

    def ours(logp, anchor, advantages):
        return grpo_clip_loss(logp, anchor, advantages, eps_clip=1e-4).loss

    def gate() -> None:
        expected = bare_loss(logp.double(), anchor.double(), advantages.double())
        got = ours(logp, anchor, advantages).double()
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)

    return Workload(
        ours=ours,
        rivals={"bare": bare_loss},
        inputs=[(logp, anchor, advantages)],
        gate=gate,
    )


CASE = BenchCase(
    name="clip_loss",
    about="clipped loss with its metrics; bound by launches",
    setup=setup,
    sizes={"B=16, S=3": {"B": 16, "S": 3}},
    smoke={"B=4, S=3": {"B": 4, "S": 3}},
)
