"""The disk's own rate, for cases that write or read files: plain bytes, as many files at a time as the case."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK = 16 * 2**20


def write_plain(folder: Path, nbytes: int, files: int) -> None:
    """Writes `nbytes` of noise to `files` new files at once; on the disk when it returns."""
    block = os.urandom(_BLOCK)

    def write(path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            left = nbytes // files
            while left > 0:
                left -= file.write(block[: min(left, _BLOCK)])
            os.fsync(file.fileno())

    _at_once(write, [folder / f"plain-{number}" for number in range(files)])


def read_plain(folder: Path, files: int) -> None:
    """Reads what `write_plain` wrote."""

    def read(path: Path) -> None:
        buffer = bytearray(_BLOCK)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    _at_once(read, [folder / f"plain-{number}" for number in range(files)])


def forget(folder: Path) -> None:
    """Drops the files below `folder`, which are on the disk, from the page cache: the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _at_once(work: Callable[[Path], None], paths: list[Path]) -> None:
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(work, paths))
