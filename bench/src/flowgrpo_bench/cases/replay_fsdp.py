"""Replay under FSDP2 on two GPUs, 16 transitions on each: forward and backward, and the mean of the gradients.

Beside it FSDP2 around plain diffusers + peft: eager, and with `compile_repeated_blocks`.
"""

from collections.abc import Mapping
from typing import Any

from flowgrpo_bench.case import BenchCase, Workload

WORLD = 2


def setup(
    device: str, *, model: Mapping[str, Any], side: int, text: int, rank: int, gathered: bool = False
) -> Workload:
    """Two groups of 8 candidates at 2 steps; a rank replays its half of the candidates of each.

    As many blocks stay gathered between forward and backward as the actor finds memory for; with `gathered` all of
    them, by `--no-fsdp-reshard-after-forward`, and plain diffusers has no room beside it.
    """
    from flowgrpo_bench.ranks import Ranks
    from flowgrpo_bench.replay import FsdpReplay, within

    ranks = Ranks(WORLD, device, FsdpReplay, model, side, text, rank, gathered)

    def gate() -> None:
        same, apart, noise, parity = zip(*ranks.all("check"), strict=True)
        assert all(same), "an anchor is not its own forward"
        assert max(apart) <= within(max(noise)), (
            f"{max(apart)} nats from plain diffusers, whose own noise is {max(noise)}"
        )
        print(f"  nats from plain diffusers {max(apart):.1e}, its own noise {max(noise):.1e}; parity {max(parity):.1e}")
        peaks = {} if gathered else {"plain": max(ranks.all("peak_gb", "plain"))}
        ranks.all("forget_plain")
        peaks["train"] = max(ranks.all("peak_gb", "train"))
        print("  peak GB: " + ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items()))

    rivals = {
        "diffusers": lambda: ranks.all("plain"),
        "diffusers, compiled blocks": lambda: ranks.all("compiled"),
    }
    return Workload(ours=lambda: ranks.all("train"), rivals={} if gathered else rivals, gate=gate)


QWEN_IMAGE = {"model": {}, "side": 384, "text": 128, "rank": 64}
HEADS = {"attention_head_dim": 32, "num_attention_heads": 2, "axes_dims_rope": (8, 12, 12)}
TINY = {"model": {"num_layers": 2, "joint_attention_dim": 64, **HEADS}, "side": 64, "text": 9, "rank": 4}
CASE = BenchCase(
    name="replay_fsdp",
    about="16 replayed transitions on each of two GPUs under FSDP2, full-size Qwen-Image, LoRA 64, 384 x 384",
    setup=setup,
    sizes={
        "2 x 16 transitions": QWEN_IMAGE,
        "2 x 16 transitions, weights kept gathered": {**QWEN_IMAGE, "gathered": True},
    },
    smoke={
        "2 x 16 transitions, tiny model": TINY,
        "2 x 16 transitions, tiny model, weights kept gathered": {**TINY, "gathered": True},
    },
    devices=("cuda",),
    timers=("wall",),
    gpus=WORLD,
    samples=3,
    launches=False,
    tolerance={"cpu": 0.5, "cuda": 0.15},
)
