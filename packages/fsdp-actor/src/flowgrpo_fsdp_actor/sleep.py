"""Sleep and wake: the device memory of tensors given back, their values kept on the host, bit for bit (F4).

Works on storages, not on tensors: FSDP's shards, their views and padding share one storage, and resizing it to
zero frees it under all of them while every tensor object stays what it is. Host memory is pinned once and
reused; a tensor that nobody writes (a frozen base) is copied to the host once only.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from flowgrpo_rollout_sglang.pinned import pinned_slabs
from torch import Tensor

MAX_SLAB_BYTES = 1 << 30
"""Host memory is made in slabs that storages share: 1,900 allocations for a 20 B model would take seconds."""
POOLED_BYTES = 1 << 20
"""torch serves smaller allocations from blocks of their own, larger ones from the rest of any free block."""


@dataclass
class _Sleeper:
    """One storage and where its bytes lie on the host."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: list[Tensor]
    frozen: bool
    copied: bool = False

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(device bytes, host bytes), piece by piece; the storage must be there."""
        on_device = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        yield from zip(on_device.split([piece.numel() for piece in self.host]), self.host, strict=True)


class DeviceMemory:
    """The storages of a set of tensors, which leave the device together and come back together."""

    def __init__(self) -> None:
        self._sleepers: dict[int, _Sleeper] = {}
        self._arena = _HostArena()
        self._asleep = False

    @property
    def asleep(self) -> bool:
        return self._asleep

    def sleep(self, trained: Iterable[Tensor], frozen: Iterable[Tensor]) -> int:
        """Copies the tensors to the host and frees their storages; returns the bytes freed.

        `frozen` tensors must not have been written since the last sleep: their first host copy is kept.
        """
        if self._asleep:
            return 0
        storages = {t.untyped_storage()._cdata: (t.untyped_storage(), False) for t in trained}
        storages |= {t.untyped_storage()._cdata: (t.untyped_storage(), True) for t in frozen}
        self._adopt({key: value for key, value in storages.items() if value[0].nbytes() > 0})
        sleepers = self._sleepers.values()
        with _copy_stream(sleepers) as stream, torch.cuda.stream(stream):
            for sleeper in sleepers:
                if not (sleeper.frozen and sleeper.copied):
                    for on_device, host in sleeper.pairs():
                        host.copy_(on_device, non_blocking=True)
                    sleeper.copied = True
        for sleeper in sleepers:
            sleeper.storage.resize_(0)
        self._asleep = True
        return sum(sleeper.num_bytes for sleeper in sleepers)

    def wake(self) -> int:
        """Gives every storage its size and bytes back; returns the bytes restored."""
        if not self._asleep:
            return 0
        sleepers = self._sleepers.values()
        _reserve(sleepers)
        with _copy_stream(sleepers) as stream:
            for sleeper in sleepers:
                sleeper.storage.resize_(sleeper.num_bytes)
                with torch.cuda.stream(stream):
                    for on_device, host in sleeper.pairs():
                        on_device.copy_(host, non_blocking=True)
        self._asleep = False
        return sum(sleeper.num_bytes for sleeper in sleepers)

    def _adopt(self, storages: dict[int, tuple[torch.UntypedStorage, bool]]) -> None:
        """Host memory for storages seen for the first time; those that are gone are forgotten."""
        self._sleepers = {key: sleeper for key, sleeper in self._sleepers.items() if key in storages}
        new = {key: value for key, value in storages.items() if key not in self._sleepers}
        if not new:
            return
        pinned = next(iter(new.values()))[0].device.type == "cuda"
        self._arena.reserve(sum(storage.nbytes() for storage, _ in new.values()), pinned)
        for key, (storage, frozen) in new.items():
            size = storage.nbytes()
            self._sleepers[key] = _Sleeper(storage, size, self._arena.take(size), frozen)


class _HostArena:
    """Host memory handed out in order; a request may span two slabs."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def reserve(self, num_bytes: int, pinned: bool) -> None:
        """Makes room for `num_bytes` more."""
        missing = num_bytes - sum(piece.numel() for piece in self._free)
        sizes = [min(MAX_SLAB_BYTES, missing - start) for start in range(0, missing, MAX_SLAB_BYTES)]
        self._free += pinned_slabs(sizes) if pinned else [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def take(self, num_bytes: int) -> list[Tensor]:
        """The next `num_bytes` reserved bytes, in one or more pieces."""
        pieces = []
        while num_bytes > 0:
            piece = self._free.pop(0)
            pieces.append(piece[:num_bytes])
            if piece.numel() > num_bytes:
                self._free.insert(0, piece[num_bytes:])
            num_bytes -= pieces[-1].numel()
        return pieces


def _reserve(sleepers: Iterable[_Sleeper]) -> None:
    """One allocation from the driver for all storages, which the cache then hands out and gets back in pieces.

    A thousand of them would cost a tenth of a sleep, when each is given back to the driver.
    """
    large = [sleeper for sleeper in sleepers if sleeper.num_bytes > POOLED_BYTES]
    if large and (device := large[0].storage.device).type == "cuda":
        torch.cuda.empty_cache()
        torch.empty(sum(-(-sleeper.num_bytes // 512) * 512 for sleeper in large), dtype=torch.uint8, device=device)


@contextmanager
def _copy_stream(sleepers: Iterable[_Sleeper]) -> Iterator[torch.cuda.Stream | None]:
    """A stream of its own for the copies, None on the CPU; on leaving, the host has waited for them."""
    device = next((sleeper.storage.device for sleeper in sleepers), torch.device("cpu"))
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    yield stream
    stream.synchronize()
