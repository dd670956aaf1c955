"""Out of device memory, said so that it can be mended: the phase, the rank, the bytes, and what to lower.

torch's own error knows neither what the actor was doing nor which setting decides how much that takes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from flowgrpo_rollout_sglang.device_memory import asked_and_free

from flowgrpo_fsdp_actor.errors import OutOfDeviceMemory

LOADING = "loading the model"
REPLAY = "replay"
OPTIMIZER = "the optimizer step"
PARITY = "the parity check"
GATHER = "gathering weights for the sync"
SLEEP = "sleep"
WAKE = "wake"

_MORE_CARDS = "each card's share with more cards (--resource)"
_OTHERS = "what else is on the card: set --offload-rollout, and --reward-runtime cpu or remote"
LOWER = {
    REPLAY: "--replay-join (or --micro-batch-size) or the size of the pictures; or set --fsdp-activation-checkpointing;"
    f" or {_OTHERS}; or {_MORE_CARDS}",
    PARITY: f"--replay-join, or {_OTHERS}",
    OPTIMIZER: f"what is trained: --fsdp-trainable-mode lora, or a smaller --lora-rank; or {_OTHERS}; or {_MORE_CARDS}",
    GATHER: f"--weight-sync-bucket-size-mb, or what is sent: --lora-adapter-mode; or {_OTHERS}; or {_MORE_CARDS}",
    WAKE: f"{_OTHERS}; or {_MORE_CARDS}",
    SLEEP: f"{_OTHERS}",
    LOADING: f"{_MORE_CARDS}, or what is trained: --fsdp-trainable-mode lora; nothing else may be on the card",
}
Error = TypeVar("Error", bound=BaseException)


@contextmanager
def memory_phase(phase: str) -> Iterator[None]:
    """A part of a longer phase which an out-of-memory error is to name instead."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise named(error, phase) from error


def named(error: Error, phase: str) -> Error | OutOfDeviceMemory:
    """`error` itself, or for torch's out-of-memory error the one that says what to do."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    asked, free = asked_and_free(str(error))
    rank = dist.get_rank() if dist.is_initialized() else 0
    return OutOfDeviceMemory(phase, rank, asked, free, LOWER.get(phase, LOWER[REPLAY]), str(error))
