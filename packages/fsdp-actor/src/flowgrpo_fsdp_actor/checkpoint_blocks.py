"""One file of a checkpoint as a stream of checked blocks: every MiB has a CRC-32, and none is believed without it.

Written with O_DIRECT where the file system has it: written through the page cache, many GB push out everything else,
the kernel stops the writers whenever too much is dirty, and the disk's rate was seen to fall to a fifth. Read through
the page cache, where reading ahead made it the faster way.

A CRC-32 sees every flipped bit and every run of up to 32 wrong ones; anything else passes with a chance of 2^-32. It
is there against faults of disks and copies, not against an adversary.
"""

import errno
import fcntl
import io
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from flowgrpo_rollout_sglang.pinned import pinned_block
from torch import Tensor

from flowgrpo_fsdp_actor.errors import CheckpointError

CHECKED = 2**20
"""Bytes of a block, the unit of checking; a read of less reads the whole block. The last of a file is shorter."""
RESTORE = (
    "restore it from a copy; or go back to an older checkpoint: an export by --iteration, a resume once this one's "
    "folder is moved away and latest_checkpointed_iteration.txt beside it names the older"
)


@dataclass(frozen=True)
class CheckedFile:
    """A file on the disk, and what its blocks must sum up to."""

    path: Path
    crcs: tuple[int, ...]

    def fill(self, file: io.FileIO, first: int, into: memoryview) -> int:
        """Reads block `first` and those behind it into `into`, as far as it or the file goes; returns the bytes.

        Raises CheckpointError for a block whose content is not what was written.
        """
        file.seek(first * CHECKED)
        count = 0
        while count < len(into) and (more := file.readinto(into[count:])):
            count += more
        for number, block in enumerate(_blocks(into[:count]), first):
            if number >= len(self.crcs) or zlib.crc32(block) != self.crcs[number]:
                where = f"bytes {number * CHECKED} to {number * CHECKED + len(block)}"
                raise CheckpointError(str(self.path), f"was changed after it was saved ({where})", RESTORE)
        return count


def staging(nbytes: int, *, pinned: bool) -> Tensor:
    """[nbytes] uint8 on the host, at the start of a page as O_DIRECT wants it; page-locked for copies from a GPU."""
    return pinned_block(nbytes) if pinned else torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def write_checked(buffer: Tensor, path: Path, parts: Iterable[Tensor]) -> tuple[int, ...]:
    """Writes the bytes of `parts`, one after the other, through `buffer`; on the disk when it returns.

    Args:
        buffer: from `staging`, whole MiBs.
        parts: contiguous, of any dtype, on any device.

    Returns:
        The CRC-32 of every block. Raises OSError with the path in it.
    """
    descriptor = _open(path)
    size, crcs = 0, list[int]()
    try:
        for nbytes in _filled(buffer, parts):
            data = buffer.numpy().data
            crcs += map(zlib.crc32, _blocks(data[:nbytes]))
            _write(descriptor, data[: nbytes + -nbytes % mmap.PAGESIZE])  # O_DIRECT writes whole pages
            size += nbytes
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # a write on a full disk does not say where
        raise
    finally:
        os.close(descriptor)
    return tuple(crcs)


def read_checked(buffer: Tensor, stored: CheckedFile, spans: Sequence[tuple[int, torch.dtype, Tensor]]) -> None:
    """Fills each target from the file's bytes, through `buffer`, cast where the dtypes differ.

    Args:
        buffer: from `staging`, whole MiBs.
        spans: (first byte in the file, a multiple of the stored dtype's size; stored dtype; flat target).

    Raises CheckpointError for a block that was changed: targets before it have been filled. OSError.
    """
    ends = [start + target.numel() * dtype.itemsize for start, dtype, target in spans]
    wanted = {
        block for (start, _, _), end in zip(spans, ends, strict=True) for block in range(start // CHECKED, _up(end))
    }
    held = range(0)  # the file's bytes that the buffer holds
    with open(stored.path, "rb", buffering=0) as file:
        for (start, dtype, target), end in sorted(zip(spans, ends, strict=True), key=lambda pair: pair[0][0]):
            at = start
            while at < end:
                if at not in held:
                    first = at // CHECKED
                    blocks = _run(wanted, first, buffer.numel() // CHECKED)
                    count = stored.fill(file, first, buffer[: blocks * CHECKED].numpy().data)
                    held = range(first * CHECKED, first * CHECKED + count)
                    if at not in held:
                        raise CheckpointError(str(stored.path), "ends in the middle of a tensor", RESTORE)
                stop = min(end, held.stop)
                part = buffer[at - held.start : stop - held.start].view(dtype)
                target[(at - start) // dtype.itemsize :][: part.numel()].copy_(part)
                at = stop


def _filled(buffer: Tensor, parts: Iterable[Tensor]) -> Iterator[int]:
    """Copies `parts` into `buffer`; how many bytes it holds, each time that it is full, and at the end."""
    at = 0
    for part in parts:
        flat = part.view(-1).view(torch.uint8)
        while flat.numel():
            if at == buffer.numel():
                yield _arrived(at)
                at = 0
            fits = flat[: buffer.numel() - at]
            buffer[at : at + fits.numel()].copy_(fits, non_blocking=True)
            at, flat = at + fits.numel(), flat[fits.numel() :]
    yield _arrived(at)


def _arrived(nbytes: int) -> int:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return nbytes


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)  # a file system without O_DIRECT


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # The file system opens with O_DIRECT but does not write so; or a file size limit left half a page.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _blocks(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + CHECKED] for start in range(0, len(data), CHECKED))


def _run(wanted: set[int], first: int, most: int) -> int:
    """How many blocks from `first` on are wanted without a gap, `most` at most."""
    return next((count for count in range(1, most) if first + count not in wanted), most)


def _up(end: int) -> int:
    """The blocks of a file that ends at byte `end`."""
    return -(-end // CHECKED)
