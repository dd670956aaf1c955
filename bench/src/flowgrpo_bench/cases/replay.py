"""Replayed transitions through the full-size transformer, forward and backward, or forward alone (anchors).

Beside plain diffusers + peft over the same weights: one transition at a time with checkpointing (the recipe's shape),
all of them in one forward, and the same with `compile_repeated_blocks`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo_bench.case import BenchCase, Workload


def setup(
    device: str, *, model: Mapping[str, Any], side: int, texts: Sequence[int], steps: int, rank: int, train: bool
) -> Workload:
    """For each text length 8 candidates at `steps` steps, all in one forward."""
    import torch

    from flowgrpo_bench.replay import LORA, ReplayWork, plain_policy, within

    work = ReplayWork(device, model, texts, side=side, steps=steps, **(LORA | {"lora_rank": rank}))
    rows = sum(map(len, work.forwards(1)))
    plain = plain_policy(work)
    compiled = plain_policy(work, compiled=True) if device == "cuda" else None

    def checkpointed() -> None:
        plain.module.enable_gradient_checkpointing()
        work.train(1, plain)
        plain.module.disable_gradient_checkpointing()

    def gate() -> None:
        anchors = work.anchors(rows)
        assert torch.equal(anchors, work.log_probs(rows, grad=True)), "an anchor is not its own forward"
        alone, joined = work.log_probs(1, plain.module), work.log_probs(rows, plain.module)
        apart, noise = (float((other - alone).abs().max()) for other in (anchors, joined))
        assert apart <= within(noise), f"{apart} nats from plain diffusers one at a time, whose own noise is {noise}"
        print(f"  nats from plain diffusers {apart:.1e}, its own noise {noise:.1e}; parity {work.parity():.1e}")

    if not train:
        rivals = {"diffusers": lambda: work.log_probs(rows, plain.module)}
        if compiled is not None:
            rivals["diffusers, compiled blocks"] = lambda: work.log_probs(rows, compiled.module)
        return Workload(ours=lambda: work.anchors(rows), rivals=rivals, gate=gate)
    rivals = {"diffusers": lambda: work.train(rows, plain)}
    if len(texts) == 1:
        rivals["diffusers, one at a time, checkpointed"] = checkpointed
    if compiled is not None:
        rivals["diffusers, compiled blocks"] = lambda: work.train(rows, compiled)
    return Workload(ours=lambda: work.train(rows), rivals=rivals, gate=gate)


QWEN_IMAGE = {"model": {}, "side": 384, "rank": 64}
ONE_LENGTH, MIXED = {"texts": (128,), "steps": 2}, {"texts": (100, 128), "steps": 1}
SMALL = {"side": 64, "rank": 4, "texts": (9,), "steps": 2}


def _tiny(**more: Any) -> dict[str, Any]:
    heads = {"attention_head_dim": 32, "num_attention_heads": 2, "axes_dims_rope": (8, 12, 12)}
    return {"model": {"num_layers": 2, "joint_attention_dim": 64, **heads}, **SMALL, **more}


CASE = BenchCase(
    name="replay",
    about="16 replayed transitions, forward and backward or anchors, full-size Qwen-Image, LoRA 64, 384 x 384",
    setup=setup,
    sizes={
        "16 transitions, 128 text tokens": {**QWEN_IMAGE, **ONE_LENGTH, "train": True},
        "16 transitions, 100 and 128 text tokens": {**QWEN_IMAGE, **MIXED, "train": True},
        "16 anchors, 128 text tokens": {**QWEN_IMAGE, **ONE_LENGTH, "train": False},
    },
    cpu_sizes={"16 transitions, tiny model": _tiny(train=True), "16 anchors, tiny model": _tiny(train=False)},
    smoke={"16 transitions, tiny model": _tiny(train=True)},
    timers=("wall",),
    samples=3,
    launches=False,
)
