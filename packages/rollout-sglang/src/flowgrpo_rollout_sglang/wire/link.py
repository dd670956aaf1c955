"""A link between one sender and one receiver on the same host: shared bucket slots, and a socket that rings.

The sender listens on a Unix socket and describes it in a `Channel`, a small JSON text that travels with `begin`. The
receiver connects and gets the slots: for `shm` the descriptor of an anonymous shared memory, which has no name, so
nothing is left behind however the processes end; for `cuda_ipc` a handle in the channel. From then on the socket
carries one short message per bucket. It also is the watch on the other process: when that one dies, the kernel closes
the socket and the next read ends at once; when it hangs, the read ends after `timeout_s`.

A link is kept between transactions and closed after any failure, so no message of a failed one meets the next. To close
it the sender hangs up and waits; the receiver, also an idle one, lets its view of the slots go and then closes its end;
only then are they freed: what happens to device memory that is freed while another process maps it, CUDA leaves open.

Messages: 4-byte kind, payload length (uint32), sequence number (uint64), payload.
    FILL n   sender:   bucket n lies in slot n mod slots
    DRAN n   receiver: bucket n is written to the parameters, its slot is free
    SEAL n   sender:   n buckets were all; the payload holds the fingerprints, uint64 each
    FAIL     either:   the payload is a WeightSyncError in JSON; the transaction is over
"""

import fcntl
import hmac
import json
import mmap
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from flowgrpo_rollout_sglang.wire.errors import WeightSyncError

Transport = Literal["shm", "cuda_ipc"]

_HEADER = struct.Struct("<4sIQ")
_MAX_PAYLOAD = 64 * 2**20
_LOOK_S = 0.5
"""Where the system does not say that the other end hung up: how often an idle end looks."""
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux, 104 elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """How a receiver reaches a sender's slots. Plain text and numbers: nothing in it is executed."""

    transport: Transport
    link: str
    """Changes with each new link; the same as before means that the open one goes on."""
    address: str
    """Path of the sender's Unix socket."""
    token: str
    """What the receiver sends first, so that no other process can take its place."""
    slots: int
    slot_bytes: int
    timeout_s: float
    device_uuid: str = ""
    """`cuda_ipc`: the GPU that holds the slots; the index may differ between processes, the UUID does not."""
    memory_handle: str = ""
    """`cuda_ipc`: hex of the CUDA IPC handle of the slots."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError if the text is no channel."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a weight channel ({error}): {text[:200]!r}") from error


class PeerLostError(RuntimeError):
    """The other end closed the link, usually because its process ended."""


class PeerSilentError(RuntimeError):
    """The other end did not answer in time."""


class Link:
    """One end of an open link. `sender` and `receiver` below make one."""

    def __init__(self, connection: socket.socket, timeout_s: float):
        self._connection = connection
        self._connection.settimeout(timeout_s)
        self.timeout_s = timeout_s

    def send(self, kind: bytes, sequence: int, payload: bytes = b"") -> None:
        """Raises PeerLostError, PeerSilentError, WeightSyncError (what the peer reported before it closed)."""
        try:
            self._connection.sendall(_HEADER.pack(kind, len(payload), sequence) + payload)
        except TimeoutError as error:
            raise PeerSilentError(f"took no message for {self.timeout_s:g} s") from error
        except OSError as error:
            self._raise_reported()
            raise PeerLostError(f"closed the link ({error.strerror})") from error

    def _raise_reported(self) -> None:
        """Raises the WeightSyncError that the peer sent before it closed, if it did."""
        with suppress(PeerLostError, PeerSilentError, ValueError):
            while True:
                kind, length, _ = _HEADER.unpack(self._read(_HEADER.size))
                payload = self._read(min(length, _MAX_PAYLOAD))
                if kind == b"FAIL":
                    raise WeightSyncError.from_json(payload.decode())

    def receive(self, kind: bytes, sequence: int) -> bytes:
        """The payload of the next message, which must be this kind and number.

        Raises PeerLostError, PeerSilentError, WeightSyncError (what the peer reported) and ValueError (out of step).
        """
        got, length, number = _HEADER.unpack(self._read(_HEADER.size))
        if length > _MAX_PAYLOAD:
            raise ValueError(f"a message of {length} bytes on the link; at most {_MAX_PAYLOAD} are taken")
        payload = self._read(length)
        if got == b"FAIL":
            raise WeightSyncError.from_json(payload.decode())
        if (got, number) != (kind, sequence):
            raise ValueError(f"expected {kind.decode()} {sequence} on the link, got {got!r} {number}")
        return payload

    def is_open(self) -> bool:
        """False once the other end has closed; does not block, and takes no message, also while a thread reads."""
        try:
            with self._connection.dup() as probe:
                probe.setblocking(False)
                return probe.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def interrupt(self) -> None:
        """Ends a read that waits on this end. The other end notices nothing until this one is closed."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Says that nothing more will be sent; the other end's reads end. What it sends can still be read here."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def wait_closed(self, timeout_s: float) -> bool:
        """After `hang_up`: waits until the other end has closed, whatever it still says; False if it did not."""
        deadline = time.monotonic() + timeout_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._connection.settimeout(left)
                if not self._connection.recv(2**20):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def watch(self, hung_up: Callable[[], None]) -> None:
        """Calls `hung_up`, in a thread of its own, once the other end hangs up or this one closes. Takes no message."""
        probe = self._connection.dup()

        def wait() -> None:
            with probe:
                poll = select.poll()
                poll.register(probe, getattr(select, "POLLRDHUP", 0))  # at once on Linux; elsewhere within a look
                while not poll.poll(1e3 * _LOOK_S) and self.is_open():
                    continue
            hung_up()

        threading.Thread(target=wait, name="weights-link", daemon=True).start()

    def close(self) -> None:
        """Wakes a read that waits on either end. Safe to call twice."""
        with suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                part = self._connection.recv(min(count, 2**20))
            except TimeoutError as error:
                raise PeerSilentError(f"sent nothing for {self.timeout_s:g} s") from error
            except OSError as error:
                raise PeerLostError(f"closed the link ({error.strerror})") from error
            if not part:
                raise PeerLostError("closed the link")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def shared_memory(nbytes: int) -> int:
    """Descriptor of anonymous shared memory of that size, all pages reserved. Raises OSError if there is no room."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("flowgrpo-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, nbytes)  # now, not as SIGBUS in the middle of a bucket
        # The peer maps it too; nobody may cut it under a mapping.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd
    with tempfile.TemporaryFile() as file:  # no memfd (macOS): a file whose name is gone before it is used
        file.truncate(nbytes)
        return os.dup(file.fileno())


def map_slots(fd: int, slots: int, slot_bytes: int) -> list[Tensor]:
    """Maps the memory behind `fd`, closes `fd`, and returns the slots, [slot_bytes] uint8 each.

    The mapping lives as long as the tensors. Raises ValueError if the memory is shorter than the slots.
    """
    try:
        if os.fstat(fd).st_size < slots * slot_bytes:
            raise ValueError(f"shared memory of {os.fstat(fd).st_size} bytes for {slots} slots of {slot_bytes}")
        memory = torch.frombuffer(mmap.mmap(fd, slots * slot_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)
    return list(memory.split(slot_bytes))


class Listener:
    """The sender's end before the receiver has connected."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="flowgrpo-wire-")
        if len(folder) + 2 > _MAX_SOCKET_PATH:
            Path(folder).rmdir()
            folder = tempfile.mkdtemp(prefix="flowgrpo-wire-", dir="/tmp")
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.address = str(Path(folder, "s"))
        self.token = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen(4)

    def accept(self, timeout_s: float, fds: list[int]) -> Link:
        """The link to the process that knows the token, which gets `fds`. Raises PeerSilentError."""
        self._socket.settimeout(timeout_s)
        while True:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError as error:
                raise PeerSilentError(f"did not connect within {timeout_s:g} s") from error
            link = Link(connection, timeout_s)
            try:
                told = link._read(len(self.token))
            except (PeerLostError, PeerSilentError):
                told = b""
            if hmac.compare_digest(told, self.token.encode()):
                socket.send_fds(connection, [b"+"], fds)
                return link
            link.close()  # a stranger; the receiver may still come

    def close(self) -> None:
        self._socket.close()
        self._remove()


def connect(channel: Channel) -> Link:
    """The receiver's end. Does not wait for the sender to accept. Raises PeerLostError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(channel.timeout_s)
        connection.connect(channel.address)
        connection.sendall(channel.token.encode())
    except OSError as error:
        connection.close()
        raise PeerLostError(f"does not listen on {channel.address} ({error.strerror}); is it on this host?") from error
    return Link(connection, channel.timeout_s)


def take_fds(link: Link) -> list[int]:
    """What the sender gave the receiver on accepting it. Raises PeerLostError, PeerSilentError."""
    try:
        greeting, fds, _, _ = socket.recv_fds(link._connection, 1, 1)
    except TimeoutError as error:
        raise PeerSilentError(f"sent no slots for {link.timeout_s:g} s") from error
    except OSError as error:
        raise PeerLostError(f"closed the link ({error.strerror})") from error
    if not greeting:
        raise PeerLostError("closed the link before it shared its slots")
    return list(fds)


def receive_slots(link: Link, channel: Channel) -> list[Tensor]:
    """The receiver's view of a `shm` sender's slots. Raises PeerLostError, PeerSilentError, ValueError."""
    fds = take_fds(link)
    if not fds:
        raise ValueError("the sender shared no memory")
    return map_slots(fds[0], channel.slots, channel.slot_bytes)
