"""The other ranks, when one of them fails: who was first, and how those who wait for it are let go.

A rank that waits in a collective wakes up when its communicator is aborted (NCCL) or when a connection breaks
(gloo, which cannot be aborted: torch 2.11's `abort` does nothing there, and a failed rank whose process lives on,
as a Ray worker's does, keeps its connections). So every rank has a thread that waits for the first failure in the
store, aborts what can be aborted, and hangs up every connection to another rank's process.
Called by: `distributed`.
"""

import os
import pickle
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

FAILURE_KEY = "flowgrpo/first_failure"
CONNECTIONS_KEY = "flowgrpo/connections"
LOOK_EVERY_S = 0.25
CONNECTIONS_WAIT = timedelta(seconds=10)
Address = tuple[str, int]


class Failure(NamedTuple):
    """What the rank that failed first says: `RankFailed`'s arguments."""

    rank: int
    phase: str
    error: str


class Peers:
    """This rank's tie to the others of one process group, beside the group: it outlives the group's end."""

    def __init__(self, rank: int, world_size: int, store: dist.TCPStore):
        self._rank, self._world_size, self._port = rank, world_size, store.port
        self._store, watched = store.clone(), store.clone()  # a store serves one thread at a time
        self._torn_down = False
        self._look = threading.Event()
        self._closed = False
        self._watcher = threading.Thread(
            target=self._watch, args=(watched,), name="flowgrpo-failure-watch", daemon=True
        )
        self._watcher.start()

    @property
    def concerned(self) -> bool:
        """Whether a failure of this process is one of the group: the group is there, or fell to a failure."""
        return self._torn_down or dist.is_initialized()

    def report(self, phase: str, error: BaseException) -> Failure | None:
        """Ends the group with this rank's failure. Returns the first one if that was another rank's."""
        mine = Failure(self._rank, phase, f"{type(error).__name__}: {error}")
        first = mine
        with suppress(RuntimeError):  # the store went with rank 0: this rank's own error is all there is to say
            first = Failure(*pickle.loads(self._store.compare_set(FAILURE_KEY, b"", pickle.dumps(tuple(mine)))))
        self._tear_down()
        self._look.set()
        return None if first == mine else first

    def _tear_down(self) -> None:
        self._torn_down = True
        with suppress(RuntimeError, AssertionError, ValueError):  # already done by the other thread, or broken
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """This process joins another group: the thread ends, after it has let the others of a failed one go."""
        self._closed = True
        self._look.set()
        self._watcher.join()

    def _watch(self, store: dist.Store) -> None:
        try:
            # Looks again and again rather than waits, so that it ends with the group and not with the store's server.
            while not store.check([FAILURE_KEY]):
                if not self.concerned or (self._closed and not self._torn_down):
                    return
                self._look.wait(LOOK_EVERY_S)
                self._look.clear()
        except RuntimeError:  # the store went with rank 0, and the connections to it with that
            return
        if pickle.loads(store.get(FAILURE_KEY))[0] != self._rank:
            self._tear_down()
        with suppress(RuntimeError):
            self._hang_up(store)

    def _hang_up(self, store: dist.Store) -> None:
        """Ends every connection whose two ends are ranks: each rank says which ones it has, and compares."""
        mine = self._connections()
        store.set(f"{CONNECTIONS_KEY}/{self._rank}", pickle.dumps(list(mine)))
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            with suppress(dist.DistStoreError):  # gone: its end of the connections has gone with it
                store.wait([f"{CONNECTIONS_KEY}/{rank}"], CONNECTIONS_WAIT)
                for here, there in pickle.loads(store.get(f"{CONNECTIONS_KEY}/{rank}")):
                    if (there, here) in mine:
                        with suppress(OSError):
                            mine[there, here].shutdown(socket.SHUT_RDWR)

    def _connections(self) -> dict[tuple[Address, Address], socket.socket]:
        """This process's TCP connections by (own address, other address), but for those to the store."""
        found = {}
        for name in os.listdir("/dev/fd"):
            with suppress(OSError, ValueError):
                one = socket.socket(fileno=os.dup(int(name)))
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    own, other = _address(one.getsockname()), _address(one.getpeername())
                    if self._port not in (own[1], other[1]):
                        found[own, other] = one
        return found


def _address(name: tuple) -> Address:
    """Host and port; IPv4 the same whether or not it is written as IPv6."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
