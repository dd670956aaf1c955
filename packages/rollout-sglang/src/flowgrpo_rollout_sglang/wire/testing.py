"""A receiver or a sender in a process of its own, for tests and benchmarks: the control calls go over a pipe as JSON.

Processes come from a fork server that has torch loaded, so one starts in a few hundredths of a second.
"""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rollout_sglang.wire.errors import WeightSyncError
from flowgrpo_rollout_sglang.wire.receiver import WeightReceiver
from flowgrpo_rollout_sglang.wire.report import VerifyReport

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def serve(
    receiver: WeightReceiver, connection: Connection, more: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Answers control calls from `connection` until the other end closes it. `more`: further calls by name."""
    calls = {name: getattr(receiver, name) for name in ("begin", "verify", "commit", "abort", "ensure_serving")}
    calls |= {"version": lambda: receiver.version, **(more or {})}
    while True:
        try:
            name, arguments = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            value = calls[name](*arguments)
            answer = {"value": value.to_json() if isinstance(value, VerifyReport) else value}
        except WeightSyncError as error:
            answer = {"sync_error": error.to_json()}
        connection.send_bytes(json.dumps(answer).encode())


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
