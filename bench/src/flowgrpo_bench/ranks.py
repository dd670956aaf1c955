"""Processes of one process group, each on its own card, that answer commands: for cases of several GPUs."""

import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from flowgrpo_fsdp_actor.distributed import init_process_group
from flowgrpo_rollout_sglang.sglang_process import free_ports
from flowgrpo_rollout_sglang.wire.testing import start_process


class Ranks:
    """`world` processes, in each of which `make(rank, world, device, *arguments)` has made what answers."""

    def __init__(self, world: int, device: str, make: Callable[..., Any], *arguments: Any):
        (port,) = free_ports(1)
        started = [start_process(_rank_main, rank, world, port, device, make, arguments) for rank in range(world)]
        self._processes, self._pipes = ([pair[i] for pair in started] for i in (0, 1))
        self.stop = weakref.finalize(self, _stop, self._processes, self._pipes)
        """Ends the processes; called by itself when nobody holds this object any more."""
        self._answers()

    def all(self, command: str, *arguments: Any) -> list[Any]:
        """What that method returns on every rank. Raises RuntimeError with the words of the first that failed."""
        for pipe in self._pipes:
            pipe.send((command, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes]
        if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]:
            raise RuntimeError(failed[0])
        return [value for value, _ in answers]


def _rank_main(
    pipe: Connection, rank: int, world: int, port: int, device: str, make: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    init_process_group(rank, world, "127.0.0.1", port, device)
    made: list[Any] = []

    def answer(call: Callable[[], Any]) -> None:
        try:
            pipe.send((call(), ""))
        except Exception as error:  # for the driver to raise
            pipe.send((None, f"{type(error).__name__}: {error}"))

    answer(lambda: made.append(make(rank, world, device, *arguments)))
    while True:
        try:
            command, given = pipe.recv()
        except EOFError:
            return
        answer(lambda command=command, given=given: getattr(made[0], command)(*given))


def _stop(processes: list[Any], pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(10)
        process.kill()
