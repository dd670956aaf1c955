"""Activation checkpointing, switched block by block while the model runs: as much as memory demands (F1).

A block that recomputes keeps its inputs alone and runs its forward again in the backward. Not a wrapper module:
names of parameters stay what they are, and blocks may be switched at any time between two forwards.
Called by: `sharding` builds them, `join` decides how many of them are on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class RecomputableForward:
    """The forward of one block."""

    def __init__(self, forward: Callable[..., Any]):
        self._forward = forward
        self.recomputes = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.recomputes and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        # No dropout anywhere, so there is no random state to save and restore.
        return checkpoint(self._forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def make_recomputable(module: nn.Module, blocks: Sequence[str]) -> list[RecomputableForward]:
    """Gives each block a forward that can be switched; returns these in order."""
    forwards = []
    for name in blocks:
        block = module.get_submodule(name)
        block.forward = RecomputableForward(block.forward)
        forwards.append(block.forward)
    return forwards


@contextmanager
def recomputing(forwards: Sequence[RecomputableForward]) -> Iterator[None]:
    """Within it all blocks recompute; afterwards those that did before."""
    before = [forward.recomputes for forward in forwards]
    recompute_first(forwards, len(forwards))
    try:
        yield
    finally:
        for forward, recomputes in zip(forwards, before, strict=True):
            forward.recomputes = recomputes


def recompute_first(forwards: Sequence[RecomputableForward], count: int) -> None:
    """The first `count` blocks recompute and the others keep: at the end of the backward, most is free again."""
    for index, forward in enumerate(forwards):
        forward.recomputes = index < count
