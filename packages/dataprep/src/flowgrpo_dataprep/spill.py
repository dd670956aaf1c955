"""Rows of many records, kept on disk in buckets by their key, so that memory stays flat while equal keys are found.

Equal keys land in one bucket, in the order they were added. A bucket is small enough to hold in memory: a hundred
million records make 400,000 rows, 16 MB, a bucket.

Shapes: R rows, W words of 64 bits.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

BUCKETS = 256
SMALL_BYTES = 8 << 20
"""An input of fewer bytes needs one bucket: also packed by gzip, its rows take some 10 MB."""
_PENDING_ROWS = 65536


class SpilledRows:
    """Rows of 64-bit words [R, W] in files of a folder that the caller owns; word 0 belongs to the key.

    Word 0 must be spread evenly (a part of a hash); its lowest bits pick the bucket. `buckets` is a power of 2:
    1 for an input whose rows fit in memory, which is faster, BUCKETS for any other.
    """

    def __init__(self, folder: Path, name: str, *, words: int, buckets: int = BUCKETS):
        self.count = buckets
        self._paths = [folder / f"{name}.{bucket:03d}" for bucket in range(buckets)]
        self._words = words
        self._pending: list[np.ndarray] = []
        self._pending_rows = 0

    def add(self, rows: np.ndarray) -> None:
        """Appends uint64 rows [R, W]."""
        self._pending.append(rows)
        self._pending_rows += len(rows)
        if self._pending_rows >= _PENDING_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending, which else travels with this object when it is pickled."""
        if not self._pending_rows:
            return
        rows = np.concatenate(self._pending)
        self._pending, self._pending_rows = [], 0
        bucket = rows[:, 0] & np.uint64(self.count - 1)
        order = np.argsort(bucket, kind="stable")
        rows, bucket = np.ascontiguousarray(rows[order]), bucket[order]
        ends = np.searchsorted(bucket, np.arange(self.count, dtype=np.uint64), side="right")
        start = 0
        for path, end in zip(self._paths, ends, strict=True):
            if end > start:
                with open(path, "ab") as file:
                    file.write(rows[start:end].tobytes())
            start = end

    def bucket(self, index: int) -> np.ndarray:
        """The uint64 rows [R, W] of one bucket, in the order they were added. A small input never meets the disk."""
        path = self._paths[index]
        data = path.read_bytes() if path.exists() else b""
        rows = [np.frombuffer(data, dtype=np.uint64).reshape(-1, self._words)]
        rows += [part[part[:, 0] & np.uint64(self.count - 1) == index] for part in self._pending]
        return np.concatenate(rows)

    def buckets(self) -> Iterator[np.ndarray]:
        for index in range(self.count):
            yield self.bucket(index)


def first_of_each(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows [R, W], a 128-bit key in words 0 and 1: (is it the first of its key, index of that first), [R] each."""
    count = len(rows)
    order = np.lexsort((np.arange(count), rows[:, 1], rows[:, 0]))
    ordered = rows[order, :2]
    new = np.ones(count, dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    leader = np.empty(count, dtype=np.int64)
    leader[order] = order[np.maximum.accumulate(np.where(new, np.arange(count), 0))]
    return leader == np.arange(count), leader
