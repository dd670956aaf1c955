"""Bytes of a file to lines, as a stream: gzip, BOM and CRLF are dealt with here and nowhere else.

Only b"\\n" ends a line. Python's text mode would also break prompts at U+2028, form feeds and the like.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flowgrpo_dataprep.errors import InputError
from flowgrpo_dataprep.progress import Progress

GZIP_MAGIC, PARQUET_MAGIC, UTF8_BOM = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
CHUNK_BYTES = 32 << 20
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """The lines of a file that begin in [start, end): a share of the work for one process."""

    path: Path
    start: int
    end: int
    """Bytes of the file as it lies on disk; a gzip file is always one chunk."""


def chunks(path: Path, size: int = CHUNK_BYTES) -> list[Chunk]:
    """The chunks of a file, in order. Raises InputError for a file that cannot be read or is UTF-16."""
    with _open(path) as file:
        head = file.read(2)
        total = path.stat().st_size
    if head in UTF16_BOMS:
        raise InputError(str(path), 0, "the file is UTF-16", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8")
    if head == GZIP_MAGIC or total == 0:
        return [Chunk(path, 0, total)]
    return [Chunk(path, start, min(start + size, total)) for start in range(0, total, size)]


def chunk_lines(chunk: Chunk) -> Iterator[bytes]:
    """Every line that begins in the chunk, blank ones included, without its end."""
    with _open(chunk.path) as file:
        if file.read(2) == GZIP_MAGIC:
            yield from _gzip_lines(chunk.path, file)
            return
        file.seek(max(chunk.start - 1, 0))
        if chunk.start:
            file.readline()  # back one byte: skips the rest of a line that began before, and nothing else
        first = chunk.start == 0
        while file.tell() < chunk.end:
            # Whole lines up to the chunk's end; split() makes a million lines in a third of readline's time.
            block = file.read(min(BLOCK_BYTES, chunk.end - file.tell()))
            if not block.endswith(b"\n"):
                block += file.readline()
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            if first:
                lines[0] = lines[0].removeprefix(UTF8_BOM)
                first = False
            if b"\r" in block:
                lines = [line.rstrip(b"\r") for line in lines]
            yield from lines


def _gzip_lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    number = 0
    try:
        with gzip.open(file) as lines:
            for number, line in enumerate(lines, start=1):
                yield (line.removeprefix(UTF8_BOM) if number == 1 else line).rstrip(b"\r\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(str(path), number + 1, f"the gzip stream is broken: {error}", "copy the file again") from error


def numbered_lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end), blank lines included. Raises InputError as `chunks` does."""
    number = 0
    for chunk in chunks(path):
        before = number
        for raw in chunk_lines(chunk):
            number += 1
            yield number, raw
        if progress:
            progress.advance(number - before, chunk.end)


def lines_before(chunk: Chunk) -> int:
    """How many lines of the file begin before the chunk: its offset in line numbers."""
    count, position = 0, 0
    with _open(chunk.path) as file:
        while chunk.start and position < chunk.start and (line := file.readline()):
            position += len(line)
            count += 1
    return count


def is_parquet(path: Path) -> bool:
    with _open(path) as file:
        return file.read(4) == PARQUET_MAGIC


def _open(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb", buffering=1 << 20)
    except OSError as error:
        raise InputError(str(path), 0, error.strerror or str(error), "check the path") from error
