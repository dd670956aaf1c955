"""How the processes of one engine agree, without a server: two of them in a gloo group, and commands that fail."""

import multiprocessing
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from flowgrpo_rollout_sglang.server import ranks
from flowgrpo_rollout_sglang.server.ranks import Answer, Ranks, RefusedTogetherError, split_dims, whole_shape
from torch import nn

PROCESSES = multiprocessing.get_context("fork")  # torch is loaded, and no thread of a group runs yet


def on_two_ranks(work: Callable[[Ranks], object]) -> list[object]:
    """What `work` returns on each rank; the exit code of its process where it returned nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends = [PROCESSES.Pipe() for _ in range(2)]
    started = [PROCESSES.Process(target=_rank_main, args=(work, r, port, ends[r][1])) for r in range(2)]
    for process in started:
        process.start()
    for _, theirs in ends:
        theirs.close()
    found: list[object] = []
    for process, (ours, _) in zip(started, ends, strict=True):
        try:
            found.append(ours.recv())
        except EOFError:
            process.join()
            found.append(process.exitcode)
    for process in started:
        process.kill()
        process.join()
    return found


def _rank_main(work: Callable[[Ranks], object], rank: int, port: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    connection.send(work(Ranks(rank, 2, dist.group.WORLD)))
    dist.barrier()  # a group ends together


def answered(of: Ranks, command: Callable[[Ranks], Answer]) -> Answer:
    """As `handlers.Server.handle`."""
    try:
        return of.conclude(command(of))
    except RefusedTogetherError as refused:
        return refused.answer


def test_what_one_rank_refuses_at_any_point_all_refuse_with_its_words_and_the_next_command_is_in_step():
    def command(of: Ranks, point: int) -> Answer:
        for phase in range(2):
            if (of.rank, phase) == (1, point):
                return 409, f"rank 1 at {point}"
            of.agree()
        values = of.exchange(of.rank)
        return (409, f"rank 1 at {point}") if (of.rank, point) == (1, 2) else (200, values)

    def work(of: Ranks) -> list[Answer]:
        return [answered(of, partial(command, point=point)) for point in (3, 0, 3, 1, 3, 2, 3)]

    fine, refused = (200, [0, 1]), [(409, f"rank 1 at {point}") for point in range(3)]
    assert on_two_ranks(work) == [[fine, refused[0], fine, refused[1], fine, refused[2], fine]] * 2


def test_a_rank_that_fails_while_the_others_wait_elsewhere_ends_the_server(monkeypatch):
    """As out of memory on one card: the others are inside a sum over the ranks, and nothing else would wake them."""
    monkeypatch.setattr(ranks, "LOST_AFTER_S", 0.2)

    def work(of: Ranks) -> object:
        if of.rank == 1:
            return answered(of, lambda _: (500, "out of memory"))
        try:
            dist.recv(torch.zeros(1), src=1, tag=7)  # which nobody sends
        except RuntimeError:
            return "lost"
        return "never"

    first, second = on_two_ranks(work)
    assert second == 1
    assert first != "never"


def test_alone_a_rank_agrees_with_itself():
    alone = Ranks()
    alone.agree()
    assert alone.exchange("x") == ["x"]
    assert answered(alone, lambda _: (409, "no")) == (409, "no")


def test_layers_that_nobody_divides_are_whole():
    assert split_dims(nn.ModuleDict({"a": nn.Linear(4, 6)})) == {}
    assert whole_shape("a.weight", (3, 4), {"a.weight": 0}, 2) == (6, 4)
    assert whole_shape("b.weight", (3, 4), {"a.weight": 0}, 2) == (3, 4)
