"""One optimizer step of full fine-tuning, 16 transitions: bf16 over float32 masters, norm, clipping, AdamW.

Beside plain torch: diffusers' float32 model under bf16 autocast, with the same optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo_bench.case import BenchCase, Workload


def setup(device: str, *, model: Mapping[str, Any], side: int, texts: Sequence[int], steps: int) -> Workload:
    """A model small enough that two of them, each with its AdamW state, fit on one GPU."""
    import torch
    from diffusers import QwenImageTransformer2DModel
    from flowgrpo_fsdp_actor.optimizer import make_adamw
    from flowgrpo_fsdp_actor.update import Policy

    from flowgrpo_bench.replay import ReplayWork

    work = ReplayWork(device, model, texts, side=side, steps=steps, lr=1e-6)
    plain = QwenImageTransformer2DModel.from_config(dict(work.policy.module.config)).to(device)
    trainable = list(plain.parameters())
    rival = Policy(plain, trainable, make_adamw(work.config, trainable), [])

    def autocast() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            work.train(16, rival, keep=True)
        torch.nn.utils.clip_grad_norm_(trainable, work.config.clip_grad)
        rival.optimizer.step()
        rival.optimizer.zero_grad(set_to_none=True)

    def ours() -> dict[str, float]:
        return work.actor.update(0, work.rollout, work.advantages).metrics

    def gate() -> None:
        autocast()
        metrics = ours()
        assert (metrics["train/ratio_min"], metrics["train/ratio_max"]) == (1.0, 1.0)
        assert metrics["train/optimizer_steps"] == 1.0
        assert metrics["train/grad_norm"] > 0.0

    return Workload(ours=ours, rivals={"diffusers, autocast": autocast}, gate=gate)


HEADS = {"attention_head_dim": 32, "num_attention_heads": 2, "axes_dims_rope": (8, 12, 12)}
TINY = {"model": {"num_layers": 2, "joint_attention_dim": 64, **HEADS}, "side": 64, "texts": (7, 9), "steps": 1}
CASE = BenchCase(
    name="full_update",
    about="an optimizer step of full fine-tuning on 16 transitions, 6 layers of Qwen-Image (2.1e9 parameters)",
    setup=setup,
    sizes={"6 layers": {"model": {"num_layers": 6}, "side": 384, "texts": (128,), "steps": 2}},
    smoke={"2 tiny layers": TINY},
    devices=("cuda",),
    timers=("wall",),
    samples=5,
    launches=False,
)
