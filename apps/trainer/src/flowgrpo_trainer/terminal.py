"""Keeps one display on a terminal whole while other processes print there.

A live display redraws by moving the cursor up. A child process (a Ray worker, an inference server, a C++ library)
that writes to the terminal in between moves the cursor under it, and both are torn. So file descriptors 1 and 2,
which children inherit, lead into a pipe while the display is up; a thread takes whole lines out of it and has the
display print them above itself.
"""

import faulthandler
import os
import select
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

FLUSH_SECONDS = 0.5  # a line without an end (a prompt, a progress bar) shows after this long


class TerminalCapture:
    """While entered, what any process writes to this terminal's stdout or stderr goes to `on_lines` instead.

    `terminal` is the real terminal. Only descriptors that are terminals are taken: a stderr sent to a file stays
    there. On exit both descriptors are the terminal again and every line written so far has been handed over;
    children that outlive the capture keep the pipe, so `on_lines` must go on working.
    """

    def __init__(self, on_lines: Callable[[list[str]], None]):
        self._on_lines = on_lines
        self._taken: dict[int, int] = {}  # descriptor -> the terminal that it was
        self._lock = threading.RLock()
        self._rest = b""
        first = next(fd for fd in (1, 2) if os.isatty(fd))
        self._terminal_fd = os.dup(first)
        self.terminal: TextIO = os.fdopen(os.dup(self._terminal_fd), "w", encoding="utf-8", errors="replace")

    def __enter__(self) -> "TerminalCapture":
        _flush_std()
        self._read_fd, write_fd = os.pipe()
        for fd in (1, 2):
            if os.isatty(fd):
                self._taken[fd] = os.dup(fd)
                os.dup2(write_fd, fd)
        os.close(write_fd)
        self._faults = faulthandler.is_enabled()
        if self._faults:  # a crash report must not die in our pipe
            faulthandler.enable(self._terminal_fd)
        threading.Thread(target=self._pump, name="terminal-capture", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _flush_std()
        for fd, terminal_fd in self._taken.items():
            os.dup2(terminal_fd, fd)
            os.close(terminal_fd)
        if self._faults:
            faulthandler.enable(sys.__stderr__ if sys.__stderr__ is not None else self._terminal_fd)
        with self._lock:
            while self._readable(0.0) and self._read_once():
                pass
            self._show_rest()

    def _pump(self) -> None:
        while True:
            if not self._readable(FLUSH_SECONDS if self._rest else None):
                with self._lock:
                    self._show_rest()
                continue
            with self._lock:
                if self._readable(0.0) and not self._read_once():
                    return  # nobody holds the other end any more

    def _readable(self, seconds: float | None) -> bool:
        return bool(select.select([self._read_fd], [], [], seconds)[0])

    def _read_once(self) -> bool:
        data = os.read(self._read_fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:  # all that came in one read together: a redraw a line would slow a talkative child
            self._on_lines([line.decode(errors="replace").rstrip("\r") for line in lines])
        return bool(data)

    def _show_rest(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._on_lines([rest.decode(errors="replace").rstrip("\r")])


def _flush_std() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
