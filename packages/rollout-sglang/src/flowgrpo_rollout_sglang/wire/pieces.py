"""The table that the native copies read: one row for each piece of a bucket, in the order of `csrc/wire_copy.h`."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flowgrpo_rollout_sglang.wire.layout import Bucket
from flowgrpo_rollout_sglang.wire.manifest import TensorEntry, WireDtype

COLUMNS = 9
CHUNK_BYTES = 64 * 1024
"""Wire bytes that one block copies: kChunk."""

_KINDS: dict[tuple[torch.dtype, WireDtype], int] = {
    (torch.bfloat16, "bf16"): 0,
    (torch.float32, "fp32"): 0,
    (torch.float32, "bf16"): 1,
    (torch.bfloat16, "fp32"): 2,
}


def is_native_source(tensor: Tensor) -> bool:
    """Whether the native gather reads this tensor as it is: also a slice of it, whose rows are evenly spaced."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        rows(tensor)
    except ValueError:
        return False
    return True


def rows(tensor: Tensor) -> tuple[int, int]:
    """(elements that lie together, elements from one such row to the next); (0, 0) if all lie together.

    Raises ValueError if the rows are not evenly spaced.
    """
    if tensor.is_contiguous():
        return 0, 0
    shape, stride = tensor.shape, tensor.stride()
    dims = [d for d in range(tensor.dim()) if shape[d] > 1]
    inner = 1
    while dims and stride[dims[-1]] == inner:
        inner *= shape[dims.pop()]
    for outer, next_outer in pairwise(dims):
        if stride[outer] != stride[next_outer] * shape[next_outer]:
            raise ValueError(f"rows of a target must be evenly spaced, got shape {tuple(shape)} and stride {stride}")
    return inner, stride[dims[-1]]


def piece_rows(
    bucket: Bucket, tensors: Sequence[Tensor], entries: Sequence[TensorEntry]
) -> tuple[list[list[int]], int]:
    """The table of one bucket, and how many blocks copy it. `tensors`: one for each piece."""
    table: list[list[int]] = []
    chunks = 0
    for piece, tensor in zip(bucket.pieces, tensors, strict=True):
        kind = _KINDS[tensor.dtype, entries[piece.tensor].dtype]
        place = (tensor.data_ptr(), piece.start, piece.nbytes, piece.offset, piece.tensor)
        table.append([*place, kind, *rows(tensor), chunks])
        chunks += -(-piece.nbytes // CHUNK_BYTES)
    return table, chunks
