"""The actor's state as a checkpoint holds it: trainable weights and AdamW state, by names that no wrapper is in.

How it lies on disk is `checkpoint_files`' and `checkpoint_shards`' matter (C1, C4).
"""

from collections.abc import Mapping
from typing import Any

import torch
from flowgrpo_rollout_sglang.wire.manifest import strip_transport_wrappers
from torch import Tensor, nn

from flowgrpo_fsdp_actor.errors import CheckpointMismatch

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoint_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """{"model": {name: weight}, "optimizer": {"name.exp_avg": ..., "name.exp_avg_sq": ..., "name.step": ...}}.

    The live tensors (DTensors where sharded), only the trainable ones: under LoRA that is the adapter. They may be
    written to disk, or read into.
    """
    weights = _trainable(module)
    moments: dict[str, Tensor] = {}
    for name, weight in weights.items():
        state = _adam_state(optimizer, weight)
        moments |= {f"{name}.{key}": state[key] for key in (*ADAM_MOMENTS, "step")}
    return {"model": {name: w.data for name, w in weights.items()}, "optimizer": moments}


@torch.no_grad()
def load_checkpoint_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Copies `state`, of the form of `checkpoint_state`, into the live tensors.

    Raises CheckpointMismatch for names or shapes that differ, before anything is written.
    """
    live = checkpoint_state(module, optimizer)
    pairs = [
        (f"{part}/{name}", live[part].get(name), state[part].get(name))
        for part in live
        for name in dict.fromkeys([*live[part], *state[part]])
    ]
    wrong = tuple(name for name, ours, theirs in pairs if ours is None or theirs is None or ours.shape != theirs.shape)
    if wrong:
        raise CheckpointMismatch(wrong)
    for _, ours, theirs in pairs:
        if ours is not theirs:
            ours.copy_(theirs)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {strip_transport_wrappers(name): p for name, p in module.named_parameters() if p.requires_grad}


def _adam_state(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of `weight`, made as its own first step would make it where there is none yet."""
    state = optimizer.state[weight]
    if not state:
        device = weight.device if optimizer.defaults.get("fused") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for key in ADAM_MOMENTS:
            state[key] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state
