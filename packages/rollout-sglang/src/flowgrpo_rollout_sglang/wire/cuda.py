"""Slots in device memory that both processes see: bytes never leave the GPU. The memory is opened once for a link.

A message says that a copy has ended, not that it was put on a stream: no stream ever waits for another process, so one
that is killed cannot leave the other one's GPU work hanging. Two slots keep the GPU busy meanwhile.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowgrpo_rollout_sglang.wire import cuda_memory, host, native
from flowgrpo_rollout_sglang.wire.errors import DeviceMismatchError
from flowgrpo_rollout_sglang.wire.layout import Bucket
from flowgrpo_rollout_sglang.wire.link import Channel, Link, take_fds
from flowgrpo_rollout_sglang.wire.manifest import ITEM_BYTES, TensorEntry
from flowgrpo_rollout_sglang.wire.pieces import COLUMNS, is_native_source, piece_rows

# A process cannot open its own handles. An engine in the sender's process finds the slots here, by memory handle.
_own_slots: dict[str, "CudaSenderSlots"] = {}


class _Stopwatch:
    """Time that a stream spent between pairs of events."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._used = 0

    def restart(self) -> None:
        self._used = 0

    def start(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Records the first of a pair and returns the second one, for the caller to record."""
        if self._used == len(self._pairs):
            self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        first, second = self._pairs[self._used]
        self._used += 1
        first.record(stream)
        return second

    def seconds(self) -> float:
        """All pairs must have been reached."""
        return sum(first.elapsed_time(second) for first, second in self._pairs[: self._used]) / 1e3


class _Copies:
    """Gather and scatter of one transaction, native where it can be."""

    def __init__(self, device: torch.device):
        self._is_native = native.load() is not None
        self.device = device
        self._sums = torch.zeros(0, dtype=torch.int64, device=device)
        self._entries: Sequence[TensorEntry] = ()
        # Rows of the native copies: pinned, so that they travel while the host works on, and not overwritten before
        # the end of a transaction.
        self._pinned = self._there = torch.empty(0, COLUMNS, dtype=torch.int64)
        self._rows = 0
        self.watch = _Stopwatch()

    def begin(self, entries: Sequence[TensorEntry], buckets: Sequence[Bucket]) -> None:
        """Everything of the last transaction has ended."""
        self._entries, self._rows = entries, 0
        self._sums = torch.zeros(len(entries), dtype=torch.int64, device=self.device)
        self.watch.restart()
        pieces = sum(len(bucket.pieces) for bucket in buckets)
        if self._is_native and self._pinned.shape[0] < pieces:
            self._pinned = torch.empty(pieces, COLUMNS, dtype=torch.int64, pin_memory=True)
            self._there = torch.empty(pieces, COLUMNS, dtype=torch.int64, device=self.device)

    def table(self, bucket: Bucket, tensors: Sequence[Tensor]) -> "_Launch | None":
        """What a native copy of this bucket needs, on its way to the device; None where the plain copies run."""
        if not self._is_native:
            return None
        rows, chunks = piece_rows(bucket, tensors, self._entries)
        run = slice(self._rows, self._rows + len(rows))
        self._rows = run.stop
        self._pinned[run] = torch.tensor(rows, dtype=torch.int64)
        self._there[run].copy_(self._pinned[run], non_blocking=True)
        return _Launch(self._there[run], chunks, ITEM_BYTES[self._entries[bucket.pieces[0].tensor].dtype])

    def gather(self, slot: Tensor, bucket: Bucket, sources: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        if self._is_native:
            sources = self._readable(bucket, sources)
        launch = self.table(bucket, sources)
        end = self.watch.start(stream)
        if launch is None:
            host.pack(slot, bucket, sources, self._entries, self._sums)
        else:
            _operators().gather(launch.rows, self._sums, slot.data_ptr(), *launch[1:], stream.cuda_stream)
        end.record(stream)

    def scatter(
        self,
        slot: Tensor,
        bucket: Bucket,
        targets: Sequence[Tensor],
        launch: "_Launch | None",
        stream: torch.cuda.Stream,
    ) -> None:
        end = self.watch.start(stream)
        if launch is None:
            host.scatter(slot, bucket, targets, self._entries, self._sums)
        else:
            _operators().scatter(launch.rows, self._sums, slot.data_ptr(), *launch[1:], stream.cuda_stream)
        end.record(stream)

    def fingerprints(self) -> list[int]:
        """Waits for everything on the current stream."""
        return host.unsigned(self._sums.cpu())

    def _readable(self, bucket: Bucket, sources: Sequence[Tensor]) -> list[Tensor]:
        """`sources` on this GPU, contiguous, in a dtype that the gather casts; each tensor is moved at most once."""
        made: dict[int, Tensor] = {}
        ready: list[Tensor] = []
        for piece, source in zip(bucket.pieces, sources, strict=True):
            if source.device != self.device or not is_native_source(source):
                if piece.tensor not in made:
                    wire = host.TORCH_DTYPE[self._entries[piece.tensor].dtype]
                    made[piece.tensor] = source.detach().to(self.device, wire).contiguous()
                source = made[piece.tensor]
            ready.append(source)
        return ready


def _operators() -> Any:
    return native.load()  # cached, and not None where a launch was made ready


class _Launch(NamedTuple):
    """The arguments of a native copy that do not depend on the slot."""

    rows: Tensor
    """[pieces, COLUMNS] int64 on the device."""
    chunks: int
    wire_item: int


class CudaSenderSlots:
    """The sender's slots: they are allocated here and freed here. Work is put on the caller's current stream."""

    def __init__(self, slots: int, slot_bytes: int):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._copies = _Copies(self.device)
        self._pointer = cuda_memory.allocate(slots * slot_bytes, self.device)
        memory = cuda_memory.as_tensor(self._pointer, slots * slot_bytes, self.device)
        self.views = list(memory.split(slot_bytes))
        self._handle = cuda_memory.export(self._pointer, self.device).hex()
        _own_slots[self._handle] = self

    def begin(self, entries: Sequence[TensorEntry], buckets: Sequence[Bucket]) -> None:
        self._copies.begin(entries, buckets)

    def pack(self, slot: int, bucket: Bucket, sources: Sequence[Tensor]) -> None:
        """Returns when the slot holds the bucket."""
        stream = torch.cuda.current_stream(self.device)
        self._copies.gather(self.views[slot], bucket, sources, stream)
        stream.synchronize()

    def fingerprints(self) -> list[int]:
        return self._copies.fingerprints()

    def seconds(self) -> float:
        return self._copies.watch.seconds()

    def describe(self) -> dict[str, Any]:
        return {"device_uuid": cuda_memory.device_uuid(self.device), "memory_handle": self._handle}

    def fds(self) -> list[int]:
        return []

    def abandon(self) -> None:
        """Leaves the memory to the end of this process: the receiver may still have it mapped."""
        _own_slots.pop(self._handle, None)
        self.views = []

    def close(self) -> None:
        """Frees the memory; the receiver must have closed its view, or its process must have ended."""
        if _own_slots.pop(self._handle, None) is not None:
            torch.cuda.synchronize(self.device)
            self.views = []
            cuda_memory.free(self._pointer, self.device)


class CudaReceiverSlots:
    """The receiver's view of a sender's slots on the same GPU. Work is put on a stream of its own."""

    def __init__(self, link: Link, channel: Channel):
        take_fds(link)
        device = cuda_memory.device_with(channel.device_uuid)
        if device is None:
            seen = ", ".join(cuda_memory.visible_uuids()) or "none"
            raise DeviceMismatchError(f"the sender's GPU {channel.device_uuid} is not among the engine's: {seen}")
        self.device = device
        self._copies = _Copies(device)
        self._targets: Sequence[Tensor] = ()
        self._launches: Sequence[_Launch | None] = ()
        self._stream = torch.cuda.Stream(device)
        self._opened: int | None = None
        if own := _own_slots.get(channel.memory_handle):
            self._views = own.views
        else:
            self._opened = cuda_memory.open_exported(bytes.fromhex(channel.memory_handle), device)
            whole = cuda_memory.as_tensor(self._opened, channel.slots * channel.slot_bytes, device)
            self._views = list(whole.split(channel.slot_bytes))

    def begin(self, entries: Sequence[TensorEntry], targets: Sequence[Tensor], buckets: Sequence[Bucket]) -> None:
        strange = [(e.name, t.device) for e, t in zip(entries, targets, strict=True) if t.device != self.device]
        if strange:
            name, held = strange[0]
            there = cuda_memory.device_uuid(held) if held.type == "cuda" else held
            theirs = cuda_memory.device_uuid(self.device)
            raise DeviceMismatchError(f"{name} lies on {there}, the sender's slots on GPU {theirs}")
        self._targets = targets
        torch.cuda.synchronize(self.device)  # what the engine still does with the old weights ends first
        with torch.cuda.stream(self._stream):
            self._copies.begin(entries, buckets)
            # Now, while the sender packs its first bucket.
            self._launches = [
                self._copies.table(bucket, [self._targets[piece.tensor] for piece in bucket.pieces])
                for bucket in buckets
            ]

    def scatter(self, sequence: int, bucket: Bucket) -> None:
        """Returns when the parameters hold the bucket."""
        view, launch = self._views[sequence % len(self._views)], self._launches[sequence]
        with torch.cuda.stream(self._stream):
            self._copies.scatter(view, bucket, self._targets, launch, self._stream)
            self._stream.synchronize()

    def fingerprints(self) -> list[int]:
        with torch.cuda.stream(self._stream):
            return self._copies.fingerprints()

    def seconds(self) -> float:
        return self._copies.watch.seconds()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._views, self._targets, self._launches = [], (), ()
        if self._opened is not None:
            cuda_memory.close_exported(self._opened, self.device)
            self._opened = None
