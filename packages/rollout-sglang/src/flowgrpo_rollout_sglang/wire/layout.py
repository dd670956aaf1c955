"""Where each tensor lies in the buckets. Both ends compute it from the manifest, so buckets carry no header.

A tensor starts at the next multiple of `ALIGN` bytes. What does not fit into the rest of a bucket goes on at the start
of the next one: a piece. Buckets are `bucket_bytes` long, the last one shorter.
"""

from functools import lru_cache
from typing import NamedTuple

from flowgrpo_rollout_sglang.wire.manifest import TensorEntry

ALIGN = 128
"""Bytes. One memory transaction of a GPU; a multiple of 16, so pieces are copied in 16-byte words."""


class Piece(NamedTuple):
    """A run of one tensor's wire bytes inside one bucket."""

    tensor: int
    """Position of the tensor in the manifest."""
    start: int
    """First byte within the tensor's wire bytes; a multiple of ALIGN."""
    nbytes: int
    offset: int
    """First byte within the bucket; a multiple of ALIGN."""


class Bucket(NamedTuple):
    pieces: tuple[Piece, ...]
    nbytes: int
    """Bytes used, padding between pieces included."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


@lru_cache(maxsize=8)  # the same from sync to sync
def slot_bytes_for(tensors: tuple[TensorEntry, ...], bucket_size_mb: int) -> int:
    """Bytes of one slot: the bucket size in MiB, or less where everything fits into less."""
    return min(bucket_size_mb * 2**20, sum(aligned(t.nbytes) for t in tensors))


@lru_cache(maxsize=8)
def bucket_layout(tensors: tuple[TensorEntry, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """All buckets in the order of sending. `bucket_bytes`: a positive multiple of ALIGN, or ValueError."""
    if bucket_bytes <= 0 or bucket_bytes % ALIGN:
        raise ValueError(f"bucket_bytes must be a positive multiple of {ALIGN}, got {bucket_bytes}")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    at = 0  # first free byte of the bucket being filled
    for index, tensor in enumerate(tensors):
        start, size = 0, tensor.nbytes
        while start < size:
            if at == bucket_bytes:
                buckets.append(Bucket(tuple(pieces), at))
                pieces, at = [], 0
            nbytes = min(size - start, bucket_bytes - at)
            pieces.append(Piece(tensor=index, start=start, nbytes=nbytes, offset=at))
            start += nbytes
            at += aligned(nbytes)
    if pieces:
        buckets.append(Bucket(tuple(pieces), at))
    return tuple(buckets)
