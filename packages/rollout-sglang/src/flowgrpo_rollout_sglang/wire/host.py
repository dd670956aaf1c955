"""Buckets in memory that torch can address: packing and scattering with plain tensor operations.

The reference for `csrc`: the same bytes and the same fingerprints.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rollout_sglang.wire.fingerprint import piece_fingerprint
from flowgrpo_rollout_sglang.wire.layout import Bucket, Piece
from flowgrpo_rollout_sglang.wire.link import Channel, Link, map_slots, receive_slots, shared_memory
from flowgrpo_rollout_sglang.wire.manifest import ITEM_BYTES, TensorEntry, WireDtype

TORCH_DTYPE: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXACT_TARGETS: dict[WireDtype, tuple[torch.dtype, ...]] = {
    "bf16": (torch.bfloat16, torch.float32),
    "fp32": (torch.float32,),
}
"""Dtypes of a parameter that hold every value of the wire dtype, so that what is read back is what was sent."""


def _elements(piece: Piece, dtype: WireDtype) -> slice:
    item = ITEM_BYTES[dtype]
    return slice(piece.start // item, (piece.start + piece.nbytes) // item)


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of element `flat` of an array of this shape."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def _rows(target: Tensor, run: slice) -> list[tuple[Tensor, slice]]:
    """`run` of the flattened `target` as contiguous 1-D views into it, each with its place in the run.

    A contiguous target is one view. Otherwise its last dimensions that lie together are a row, as in a slice of a
    fused parameter, and there is one view for each row touched.
    """
    if target.is_contiguous():
        return [(target.view(-1)[run], slice(0, run.stop - run.start))]
    inner = 1
    dims = target.dim()
    while dims and target.stride(dims - 1) == inner:
        inner *= target.shape[dims - 1]
        dims -= 1
    outer = target.shape[:dims]
    views: list[tuple[Tensor, slice]] = []
    at = run.start
    while at < run.stop:
        row, column = divmod(at, inner)
        stop = min(run.stop, (row + 1) * inner)
        view = target[_index(row, outer)].reshape(-1)[column : column + stop - at]
        views.append((view, slice(at - run.start, stop - run.start)))
        at = stop
    return views


def pack(slot: Tensor, bucket: Bucket, sources: Sequence[Tensor], entries: Sequence[TensorEntry], sums: Tensor) -> None:
    """Casts each piece of `sources` (one tensor for each piece of the bucket) to its place in `slot`.

    Adds what it packed to `sums`, [tensors] int64. Taken from the source, not read back from the slot, so a
    slot that goes wrong is seen at the other end.
    """
    for piece, source in zip(bucket.pieces, sources, strict=True):
        entry = entries[piece.tensor]
        run = source.detach().reshape(-1)[_elements(piece, entry.dtype)].to(TORCH_DTYPE[entry.dtype])
        sums[piece.tensor] += piece_fingerprint(run, piece.start).to(sums.device)
        slot[piece.offset : piece.offset + piece.nbytes].view(run.dtype).copy_(run)


def scatter(
    slot: Tensor, bucket: Bucket, targets: Sequence[Tensor], entries: Sequence[TensorEntry], sums: Tensor
) -> None:
    """Writes each piece of `slot` into the target of its tensor and adds what the target then holds to `sums`.

    Args:
        targets: one for each tensor of the manifest, in a dtype of `EXACT_TARGETS`; may be views of larger parameters.
        sums: [tensors] int64.
    """
    for piece in bucket.pieces:
        entry = entries[piece.tensor]
        wire = TORCH_DTYPE[entry.dtype]
        values = slot[piece.offset : piece.offset + piece.nbytes].view(wire)
        views = _rows(targets[piece.tensor].detach(), _elements(piece, entry.dtype))
        for view, place in views:
            view.copy_(values[place])
        held = torch.cat([view.to(wire) for view, _ in views]) if len(views) > 1 else views[0][0].to(wire)
        sums[piece.tensor] += piece_fingerprint(held, piece.start).to(sums.device)


class HostSenderSlots:
    """The sender's slots in shared memory of the host."""

    def __init__(self, slots: int, slot_bytes: int):
        self._fd = shared_memory(slots * slot_bytes)
        self.views = map_slots(os.dup(self._fd), slots, slot_bytes)
        self._entries: Sequence[TensorEntry] = ()
        self._sums = torch.zeros(0, dtype=torch.int64)
        self._seconds = 0.0

    def begin(self, entries: Sequence[TensorEntry], buckets: Sequence[Bucket]) -> None:
        self._seconds = 0.0
        self._entries, self._sums = entries, torch.zeros(len(entries), dtype=torch.int64)

    def pack(self, slot: int, bucket: Bucket, sources: Sequence[Tensor]) -> None:
        started = time.perf_counter()
        pack(self.views[slot], bucket, sources, self._entries, self._sums)
        self._seconds += time.perf_counter() - started

    def fingerprints(self) -> list[int]:
        return unsigned(self._sums)

    def seconds(self) -> float:
        """Time spent copying since `begin`."""
        return self._seconds

    def describe(self) -> dict[str, Any]:
        """Fields of the channel that only this kind of slots has."""
        return {}

    def fds(self) -> list[int]:
        """What the receiver must get to see the slots."""
        return [self._fd]

    def abandon(self) -> None:
        """The receiver may still read them: shared memory lives as long as one of the two ends maps it."""
        self.close()

    def close(self) -> None:
        """Gives the memory back once the last tensor over it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.views = -1, []


class HostReceiverSlots:
    """The receiver's view of a sender's slots in shared memory."""

    def __init__(self, link: Link, channel: Channel):
        self.views = receive_slots(link, channel)
        self._entries: Sequence[TensorEntry] = ()
        self._targets: Sequence[Tensor] = ()
        self._sums = torch.zeros(0, dtype=torch.int64)
        self._seconds = 0.0

    def begin(self, entries: Sequence[TensorEntry], targets: Sequence[Tensor], buckets: Sequence[Bucket]) -> None:
        self._seconds = 0.0
        self._entries, self._targets = entries, targets
        self._sums = torch.zeros(len(entries), dtype=torch.int64)

    def scatter(self, sequence: int, bucket: Bucket) -> None:
        """Bucket number `sequence`, which lies in slot `sequence` mod slots."""
        started = time.perf_counter()
        scatter(self.views[sequence % len(self.views)], bucket, self._targets, self._entries, self._sums)
        self._seconds += time.perf_counter() - started

    def fingerprints(self) -> list[int]:
        """Of what the targets hold; waits until everything is written."""
        return unsigned(self._sums)

    def seconds(self) -> float:
        """Time spent copying since `begin`."""
        return self._seconds

    def close(self) -> None:
        self.views, self._targets = [], ()


def unsigned(sums: Tensor) -> list[int]:
    """int64 bits as unsigned 64-bit numbers."""
    return [value % 2**64 for value in sums.tolist()]
