"""How far a pass over the input is, on standard error: a line that rewrites itself, or one every few seconds."""

import sys
import time
from typing import TextIO


class Progress:
    """Counts records and bytes of one pass. Prints at most ten times a second, so call it as often as you like."""

    def __init__(self, what: str, total_bytes: int, *, stream: TextIO | None = None, quiet: bool = False):
        self.what, self.total_bytes = what, total_bytes
        self.records = 0
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._quiet = quiet
        self._before = 0  # bytes of files that are done
        self._now = 0
        self._started = time.monotonic()
        self._next = self._started + (0.1 if self._tty else 5.0)

    def advance(self, records: int, position: int) -> None:
        """`records` more were read; `position` is the byte reached in the current file or chunk."""
        self.records += records
        self._now = position
        moment = time.monotonic()
        if not self._quiet and moment >= self._next:
            self._next = moment + (0.1 if self._tty else 5.0)
            self._stream.write(f"\r\x1b[K{self}" if self._tty else f"{self}\n")
            self._stream.flush()

    def finished(self, records: int, size: int) -> None:
        """The current file or chunk, of `size` bytes, is done; `records` of it were not told yet."""
        self._before += size
        self.advance(records, 0)

    def done(self) -> None:
        """Clears the line that rewrites itself."""
        if self._tty and not self._quiet:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def __str__(self) -> str:
        share = (self._before + self._now) / self.total_bytes if self.total_bytes else 1.0
        rate = self.records / max(time.monotonic() - self._started, 1e-9)
        return f"{self.what}: {min(share, 1.0):4.0%}, {self.records:,} records, {rate:,.0f}/s"
