"""The ranks of one actor: how their process group starts, how they agree, and how they fail together.

A rank that raises in the middle of a collective would leave the others waiting for it. So every collective
method of the actor runs inside `fail_together`: the first error is written to the group's store, the group is
torn down, and the other ranks, whose collective breaks (`peers`), raise `RankFailed` with the first error's words.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from flowgrpo_fsdp_actor.errors import RankFailed
from flowgrpo_fsdp_actor.out_of_memory import named
from flowgrpo_fsdp_actor.peers import Peers

_peers: Peers | None = None
"""The other ranks of the group that this process joined last."""


def init_process_group(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    device: str,
    *,
    timeout_s: float = 600.0,
) -> None:
    """Joins the actor's process group: gloo for CPU tensors, with NCCL beside it for CUDA ones.

    Called by: each rank's process, once, before `FsdpActor`. `timeout_s` bounds every wait for another rank.
    Raises: torch's DistStoreError where the other ranks do not come in time.
    """
    if master_addr in ("127.0.0.1", "localhost", "::1"):
        # A laptop's host name often resolves to nothing reachable; one host needs no other interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(master_addr, master_port, world_size, is_master=rank == 0, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    device_id = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )
    global _peers
    if _peers is not None:
        _peers.close()
    _peers = Peers(rank, world_size, store) if world_size > 1 else None


def init_lone_process_group(device: str) -> None:
    """A group of one, where none was initialised: FSDP2 wants one even then. No socket is opened."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def fail_together(phase: str) -> Iterator[None]:
    """Whatever is raised inside ends every rank: here with the error itself, elsewhere with `RankFailed`.

    The process group is gone afterwards: the processes are to be started again.
    """
    try:
        yield
    except BaseException as error:
        said = named(error, phase)
        first = _peers.report(phase, said) if _peers is not None and _peers.concerned else None
        if first is not None:
            raise RankFailed(*first) from error
        if said is error:
            raise
        raise said from error


@contextmanager
def agree(phase: str) -> Iterator[None]:
    """A part without collectives that may fail on one rank: then all ranks raise, and the group lives on.

    Raises the error itself where it happened and `RankFailed` elsewhere.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # handed on below, on every rank
        error = named(caught, phase)
    if dist.is_initialized() and dist.get_world_size() > 1:
        reports: list[str | None] = [None] * dist.get_world_size()
        failed = torch.tensor(int(error is not None))
        with fail_together(phase):  # a rank that failed in an earlier phase does not come
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
            if int(failed):
                dist.all_gather_object(reports, None if error is None else f"{type(error).__name__}: {error}")
        if int(failed) and error is None:
            rank, words = next((rank, words) for rank, words in enumerate(reports) if words is not None)
            raise RankFailed(rank, phase, words)
    if error is not None:
        raise error


def all_reduced(values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """`values` reduced over the ranks; itself where there is one rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, op=op)
    return values
