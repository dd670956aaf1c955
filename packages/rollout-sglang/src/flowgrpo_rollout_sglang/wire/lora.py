"""Merge mode: the LoRA update folded into the base weight while it is packed.

    W' = W + scale * B @ A        scale = alpha / rank, in float32

so the engine runs plain weights and the update is rounded once, with the sum, when the wire casts it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LoraPair(NamedTuple):
    """The two factors of one linear layer's update."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scale: float
    """alpha / rank"""


def lora_merged(
    tensors: Iterable[tuple[str, Tensor]], adapters: Mapping[str, LoraPair]
) -> Iterator[tuple[str, Tensor]]:
    """`tensors` with the update of `adapters` (by the base weight's wire name) added, in float32 where there is one.

    Lazy, so no merged copy of the whole model exists, and the base weights stay as they are.

    Raises:
        ValueError: shapes that do not multiply, or, at the end, an adapter whose base weight never came.
    """
    left = set(adapters)
    for name, tensor in tensors:
        pair = adapters.get(name)
        if pair is None:
            yield name, tensor
            continue
        left.discard(name)
        out, rank, width = pair.b.shape[0], pair.a.shape[0], pair.a.shape[1]
        if tuple(tensor.shape) != (out, width) or pair.b.shape[1] != rank:
            shapes = f"B {tuple(pair.b.shape)}, A {tuple(pair.a.shape)}, weight {tuple(tensor.shape)}"
            raise ValueError(f"{name}: needs B [out, rank], A [rank, in] and weight [out, in], got {shapes}")
        update = pair.b.detach().to(torch.float32) @ pair.a.detach().to(torch.float32)
        yield name, tensor.detach().to(torch.float32) + pair.scale * update
    if left:
        raise ValueError(f"LoRA factors for weights that were not sent: {', '.join(sorted(left))}")
