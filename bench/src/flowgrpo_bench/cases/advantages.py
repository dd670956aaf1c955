"""Advantages of one rollout from two reward components."""

import torch

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, G: int, N: int) -> Workload:
    """G groups of N candidates with two rewards each."""
    from flowgrpo_math import combine_component_advantages

    generator = torch.Generator().manual_seed(0)
    components = {name: torch.rand(G, N, generator=generator).to(device) for name in ("ocr", "pickscore")}
    weights = {"ocr": 1.0, "pickscore": 0.5}

    def ours(components):
        return combine_component_advantages(components, weights)

    def gate() -> None:
        sums = ours(components).sum(dim=1)
        torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-5, rtol=0)

    return Workload(ours=ours, inputs=[(components,)], gate=gate)


CASE = BenchCase(
    name="advantages",
    about="advantages of one rollout, two components",
    setup=setup,
    sizes={"G=48, N=24": {"G": 48, "N": 24}},
    smoke={"G=4, N=4": {"G": 4, "N": 4}},
    devices=("cpu",),
)
