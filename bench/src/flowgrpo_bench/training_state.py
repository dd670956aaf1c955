"""What a training rank saves, without the model that trains: weights and AdamW's moments of Qwen-Image's shapes."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree
from flowgrpo_fsdp_actor.distributed import init_lone_process_group
from torch import Tensor

from flowgrpo_bench.weight_sync import checksum, flat_weights, qwen_image_lora_shapes, qwen_image_shapes


class TrainingState:
    """In place of an `FsdpActor`, for `save_checkpoint` and `load_checkpoint`.

    bf16 weights and moments of the whole transformer, or a float32 adapter of `lora_rank` with its moments.
    """

    def __init__(self, device: str, layers: int, hidden: int, lora_rank: int):
        made_group = not dist.is_initialized()
        init_lone_process_group(device)
        shapes = qwen_image_lora_shapes(layers, hidden, lora_rank) if lora_rank else qwen_image_shapes(layers, hidden)
        dtype = torch.float32 if lora_rank else torch.bfloat16
        self._memory: list[Tensor] = []
        parts: list[dict[str, Tensor]] = []
        for seed in range(3):  # weights, exp_avg, exp_avg_sq
            memory, tensors = flat_weights(shapes, device, dtype)
            generator = torch.Generator(device).manual_seed(seed)
            memory.view(torch.int16).random_(-30000, 30000, generator=generator)
            self._memory.append(memory)
            parts.append(tensors)
        weights, first, second = parts
        moments = {f"{name}.exp_avg": tensor for name, tensor in first.items()}
        moments |= {f"{name}.exp_avg_sq": tensor for name, tensor in second.items()}
        moments |= {f"{name}.step": torch.full((), 7.0) for name in weights}
        self._state = {"model": weights, "optimizer": moments}
        self.lr_scheduler_steps = 0
        self.folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=os.environ.get("BENCH_DISK", ".")))
        self.tree = CheckpointTree(self.folder, "t2i")
        weakref.finalize(self, _end, self.folder, made_group)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for part in self._state.values() for tensor in part.values())

    def checkpoint_state(self) -> dict[str, dict[str, Tensor]]:
        return self._state

    def load_checkpoint_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """What was read is in the live tensors already."""

    def rng_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "cuda": None}

    def load_rng_state(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])

    def zero(self) -> None:
        for memory in self._memory:
            memory.zero_()

    def checksum(self) -> list[int]:
        """Of every bit of weights and moments, in order."""
        moments = self._state["optimizer"]
        kinds = [(n, t) for n, t in moments.items() if not n.endswith(".step")]
        return [checksum(self._state["model"].items()), checksum(kinds)]


def _end(folder: Path, made_group: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if made_group and dist.is_initialized():
        dist.destroy_process_group()
