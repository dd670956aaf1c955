"""The disk's own rate, for cases that write or read files: plain bytes, as many files at a time as the case."""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK = 16 * 2**20


def write_plain(folder: Path, nbytes: int, files: int, *, direct: bool = True) -> None:
    """Writes at least `nbytes` of noise to `files` new files at once; on the disk when it returns.

    Past the page cache (`direct`) or through it. Raises OSError (EINVAL) where the file system has no O_DIRECT.
    """
    block = mmap.mmap(-1, _BLOCK)  # at the start of a page, as O_DIRECT wants it
    block.write(os.urandom(_BLOCK))

    def write(path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o666)
        try:
            left = -(-nbytes // files // mmap.PAGESIZE) * mmap.PAGESIZE
            while left > 0:
                left -= os.write(descriptor, memoryview(block)[: min(left, _BLOCK)])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    _at_once(write, [folder / f"plain-{number}" for number in range(files)])


def read_plain(folder: Path, at_once: int) -> None:
    """Reads what `write_plain` wrote, through the page cache, `at_once` files at a time."""

    def read(path: Path) -> None:
        buffer = bytearray(_BLOCK)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    _at_once(read, sorted(folder.glob("plain-*")), at_once)


def forget(folder: Path) -> None:
    """Drops the files below `folder`, which are on the disk, from the page cache: the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _at_once(work: Callable[[Path], None], paths: list[Path], workers: int | None = None) -> None:
    with ThreadPoolExecutor(workers or len(paths)) as pool:
        list(pool.map(work, paths))
