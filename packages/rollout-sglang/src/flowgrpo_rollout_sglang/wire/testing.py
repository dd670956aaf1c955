"""A receiver or a sender in a process of its own, for tests and benchmarks: the control calls go over a pipe as JSON.

Processes come from a fork server that has torch loaded, so one starts in a few hundredths of a second.
"""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from flowgrpo_rollout_sglang.wire.errors import WeightSyncError
from flowgrpo_rollout_sglang.wire.receiver import WeightReceiver
from flowgrpo_rollout_sglang.wire.report import SyncReport, VerifyReport
from flowgrpo_rollout_sglang.wire.sender import WeightSender
from flowgrpo_rollout_sglang.wire.shards import even_shards, sharded, sharded_shapes

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def serve(
    receiver: WeightReceiver, connection: Connection, more: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Answers control calls from `connection` until the other end closes it. `more`: further calls by name."""
    calls = {name: getattr(receiver, name) for name in ("begin", "verify", "commit", "abort", "ensure_serving")}
    calls |= {"version": lambda: receiver.version, **(more or {})}
    with suppress(EOFError, OSError):
        while True:
            _answer_one(calls, connection)


def _answer_one(calls: Mapping[str, Callable[..., Any]], connection: Connection) -> str:
    """Answers the next call; returns its name."""
    name, arguments = json.loads(connection.recv_bytes())
    try:
        value = calls[name](*arguments)
        answer = {"value": value.to_json() if isinstance(value, VerifyReport) else value}
    except WeightSyncError as error:
        answer = {"sync_error": error.to_json()}
    connection.send_bytes(json.dumps(answer).encode())
    return name


class PipeClient:
    """A `WeightReceiverClient` for a receiver behind `serve`."""

    def __init__(self, connection: Connection, name: str):
        self.name, self._connection = name, connection
        self._lock = threading.Lock()

    def call(self, name: str, *arguments: Any) -> Any:
        """Raises what the receiver raised, and EOFError or ConnectionError once its process has ended."""
        with self._lock:
            self._connection.send_bytes(json.dumps([name, arguments]).encode())
            answer = json.loads(self._connection.recv_bytes())
        if "sync_error" in answer:
            raise WeightSyncError.from_json(answer["sync_error"])
        return answer["value"]

    def begin(self, manifest: str, channel: str) -> None:
        self.call("begin", manifest, channel)

    def verify(self) -> VerifyReport:
        return VerifyReport.from_json(self.call("verify"))

    def commit(self, version: int) -> None:
        self.call("commit", version)

    def abort(self) -> None:
        self.call("abort")


class ReceiverProcess(PipeClient):
    """An engine's stand-in: a process that holds parameters and a `WeightReceiver` over them, and nothing else.

    Args:
        shapes: (wire name, shape) of its parameters.
        dtype: of the parameters, by torch's name.
        device: where they live.
        environment: variables set in the process before it begins.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[str, Sequence[int]]],
        *,
        name: str = "engine",
        dtype: str = "bfloat16",
        device: str = "cpu",
        version: int = 0,
        environment: Mapping[str, str] | None = None,
    ):
        ours, theirs = _PROCESSES.Pipe()
        named = [(key, list(shape)) for key, shape in shapes]
        self.process = _PROCESSES.Process(
            target=_receiver_main,
            args=(theirs, named, name, dtype, device, version, dict(environment or {})),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        super().__init__(ours, name)

    @property
    def version(self) -> int:
        return self.call("version")

    def ensure_serving(self) -> None:
        self.call("ensure_serving")

    def values(self, name: str) -> Tensor:
        """A parameter's values, flat, in float32."""
        return torch.tensor(self.call("values", name), dtype=torch.float32)

    def stop(self) -> None:
        self._connection.close()
        self.process.join(10)
        self.process.kill()

    def __enter__(self) -> "ReceiverProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _receiver_main(
    connection: Connection,
    shapes: list[tuple[str, list[int]]],
    name: str,
    dtype: str,
    device: str,
    version: int,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    targets = {key: torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for key, shape in shapes}
    receiver = WeightReceiver(targets, name, version=version)
    serve(receiver, connection, {"values": lambda key: targets[key].float().flatten().tolist()})


def start_process(main: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Runs `main(connection, *arguments)` in a process; returns the process and the other end of its pipe."""
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=main, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


class RankSenders:
    """A trainer's stand-in: a process for each rank of an engine, on the card of that rank, which sends it its slices.

    Their control calls come back to this process, which has the engine.
    """

    def __init__(self, ranks: int, device: str):
        started = [start_process(_rank_sender_main, rank, ranks, device) for rank in range(ranks)]
        self._processes, self._connections = zip(*started, strict=True)

    def send(
        self,
        engine: Any,
        weights: Mapping[str, Tensor],
        version: int,
        *,
        mode: str = "full",
        corrupt: int | None = None,
        only: int | None = None,
        whole: bool = False,
        swapped: bool = False,
    ) -> list[SyncReport]:
        """One sync of every rank at a time, in float32, verified and not committed; the reports by rank.

        Args:
            engine: with `split`, and with a rank in begin, verify and abort.
            corrupt: the rank whose first bucket goes wrong on its way.
            only: the rank whose sender works; None: all.
            whole: every rank is sent all of every tensor.
            swapped: each rank is sent its slices from the next one's card.

        Raises: WeightSyncError: that of the lowest rank that failed.
        """
        ranks = range(len(self._connections)) if only is None else [only]
        job = {"version": version, "mode": mode, "dims": {} if whole else engine.split()}
        body = save({name: tensor.contiguous() for name, tensor in weights.items()})

        def attend(rank: int) -> dict[str, str]:
            connection = self._connections[(rank + swapped) % len(self._connections)]
            verbs = {verb: partial(_with_rank, getattr(engine, verb), rank) for verb in ("begin", "verify", "abort")}
            outcome: dict[str, str] = {}
            of_one = job | {"rank": rank, "name": f"{engine.name}.{rank}", "corrupt": rank == corrupt}
            connection.send_bytes(json.dumps(of_one).encode())
            connection.send_bytes(body)
            while _answer_one(verbs | {"done": outcome.update}, connection) != "done":
                continue
            return outcome

        with ThreadPoolExecutor(len(ranks)) as pool:
            outcomes = list(pool.map(attend, ranks))
        if failed := [outcome["error"] for outcome in outcomes if "error" in outcome]:
            raise WeightSyncError.from_json(failed[0])
        return [SyncReport(**json.loads(outcome["report"])) for outcome in outcomes]

    def stop(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.join(10)
            process.kill()

    def __enter__(self) -> "RankSenders":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _with_rank(verb: Callable[..., Any], rank: int, *arguments: Any) -> Any:
    return verb(*arguments, rank)


def _rank_sender_main(connection: Connection, own: int, ranks: int, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(own)
    sender = WeightSender("cuda_ipc" if device == "cuda" else "shm", wire_dtype="fp32")
    with suppress(EOFError, OSError):
        while True:
            job, body = json.loads(connection.recv_bytes()), connection.recv_bytes()
            client = PipeClient(connection, job["name"])
            weights = {name: tensor.to(device) for name, tensor in load(body).items()}
            try:
                outcome = {"report": json.dumps(asdict(_send_slices(sender, weights, job, ranks, client)))}
            except WeightSyncError as error:
                outcome = {"error": error.to_json()}
            client.call("done", outcome)
    sender.close()


def _send_slices(
    sender: WeightSender, weights: Mapping[str, Tensor], job: Mapping[str, Any], ranks: int, client: PipeClient
) -> SyncReport:
    shapes = [(name, tensor.shape) for name, tensor in weights.items()]
    shards = even_shards(shapes, job["dims"], job["rank"], ranks)
    manifest = sender.manifest(sharded_shapes(shapes, shards), version=job["version"], mode=job["mode"])
    if job["corrupt"]:
        slots = sender._bridge(client.name, manifest.tensors).slots
        pack = slots.pack

        def flip(slot: int, *arguments: Any) -> None:
            pack(slot, *arguments)
            slots.views[slot][5] ^= 16

        slots.pack = flip  # its link does not outlive the failure
    return sender.send(sharded(weights.items(), shards), manifest, client)
