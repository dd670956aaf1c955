"""The processes of one engine, one for each of its devices: each does every command, and none alone.

SGLang hands a command to all of them. What one of them refuses is refused by all, with its words: they exchange
outcomes at the end of a command, and before anything that must happen on all of them or on none. With one process
nothing here does anything.
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)
Answer = tuple[int, Any]
LOST_AFTER_S = 60.0
"""How long a rank whose command failed waits for the others, which may wait for it inside the model, for ever."""


class RefusedTogetherError(RuntimeError):
    """Another rank has refused this command: what it answered."""

    def __init__(self, answer: Answer):
        super().__init__(answer)
        self.answer = answer


class Ranks:
    """This process among those of its engine.

    Args:
        rank, size: of this process, and how many there are.
        group: gloo group of them all; None where `size` is 1.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None):
        self.rank, self.size, self._group = rank, size, group

    def agree(self) -> None:
        """Returns on all ranks once all have come this far; raises RefusedTogetherError if one has failed."""
        self.exchange(None)

    def exchange(self, value: Any) -> list[Any]:
        """What each rank gave, by rank. Raises RefusedTogetherError if one has failed."""
        said = self._gather(None, value)
        if refused := [refusal for refusal, _ in said if refusal is not None]:
            raise RefusedTogetherError(refused[0])
        return [value for _, value in said]

    def conclude(self, answer: Answer) -> Answer:
        """The end of a command on all ranks: this rank's answer, or the first refusal. Every command comes here once,
        unless `agree` or `exchange` has raised."""
        refusal = answer if answer[0] != 200 else None
        refused = [refusal for refusal, _ in self._gather(refusal, None) if refusal is not None]
        return refused[0] if refused else answer

    def _gather(self, refusal: Answer | None, value: Any) -> list[tuple[Answer | None, Any]]:
        if self.size == 1:
            return [(refusal, value)]
        lost = threading.Timer(LOST_AFTER_S, _end_process, (self.rank, refusal))
        if refusal is not None:
            lost.start()
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, (refusal, value), group=self._group)
        lost.cancel()
        return said


def _end_process(rank: int, refusal: Answer | None) -> None:
    """Ends this process, and with it the server, whose main process watches (`launch`)."""
    logger.error("rank %d failed and the others did not come to agree within %g s: %s", rank, LOST_AFTER_S, refusal)
    os._exit(1)


def split_dim(layer: nn.Module) -> int | None:
    """Which dimension of a linear layer's weight tensor parallelism cuts into equal runs, rank by rank; None: it is
    whole on every rank. 0 cuts outputs, and the bias with them; 1 cuts inputs, whose products are then summed.

    Raises ValueError for a layer that holds the runs of several weights.
    """
    if getattr(layer, "tp_size", 1) == 1:
        return None
    from sglang.multimodal_gen.runtime.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    if isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):
        raise ValueError(f"{type(layer).__name__} is cut weight by weight, which no weight sync here knows")
    if isinstance(layer, ColumnParallelLinear):
        return 0
    return 1 if isinstance(layer, RowParallelLinear) else None


def split_dims(model: nn.Module) -> dict[str, int]:
    """Parameter name to the dimension that is cut; those that every rank holds whole are not in it."""
    dims: dict[str, int] = {}
    for name, layer in model.named_modules():
        if (dim := split_dim(layer)) is not None:
            dims[f"{name}.weight"] = dim
            if dim == 0 and layer.bias is not None:
                dims[f"{name}.bias"] = 0
    return dims


def whole_shape(name: str, held: tuple[int, ...], dims: Mapping[str, int], size: int) -> tuple[int, ...]:
    """The shape of a parameter of which this rank holds `held`."""
    return tuple(n * size if dims.get(name) == d else n for d, n in enumerate(held))
