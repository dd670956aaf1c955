"""Two plain processes that hold the same weights, for the weight-sync cases.

The receiving one stands for an engine: parameters, a `WeightReceiver`, and for comparison the least a sync could do:
a copy through one kept CUDA-IPC buffer with a round trip for each bucket, nothing checked.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from flowgrpo_rollout_sglang.wire import SyncReport, WeightReceiver, WeightSender, cuda_memory
from flowgrpo_rollout_sglang.wire.manifest import SyncMode
from flowgrpo_rollout_sglang.wire.testing import PipeClient, serve, start_process
from torch import Tensor

Shapes = list[tuple[str, tuple[int, ...]]]

_ALIGN = 128  # elements between the starts of tensors, as an allocator would place them
_CHUNK = 2**27  # elements of one step of a checksum


def qwen_image_shapes(layers: int = 60, hidden: int = 3072) -> Shapes:
    """Names and shapes of Qwen-Image's transformer: 1933 tensors, 20.43e9 parameters at full size."""
    text, inside, head = 3584, 4 * hidden, 128

    def linear(name: str, out: int, width: int) -> Shapes:
        return [(f"{name}.weight", (out, width)), (f"{name}.bias", (out,))]

    shapes = [*linear("img_in", hidden, 64), ("txt_norm.weight", (text,)), *linear("txt_in", hidden, text)]
    shapes += linear("time_text_embed.timestep_embedder.linear_1", hidden, 256)
    shapes += linear("time_text_embed.timestep_embedder.linear_2", hidden, hidden)
    for layer in range(layers):
        block = f"transformer_blocks.{layer}"
        for stream in ("img", "txt"):
            shapes += linear(f"{block}.{stream}_mod.1", 6 * hidden, hidden)
            shapes += linear(f"{block}.{stream}_mlp.net.0.proj", inside, hidden)
            shapes += linear(f"{block}.{stream}_mlp.net.2", hidden, inside)
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes.append((f"{block}.attn.{norm}.weight", (head,)))
        for projection in PROJECTIONS:
            shapes += linear(f"{block}.attn.{projection}", hidden, hidden)
    return shapes + linear("norm_out.linear", 2 * hidden, hidden) + linear("proj_out", 64, hidden)


PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def qwen_image_lora_shapes(layers: int = 60, hidden: int = 3072, rank: int = 64) -> Shapes:
    """LoRA factors on the eight attention projections: 960 tensors, 188.7e6 parameters at full size."""
    return [
        (f"transformer_blocks.{layer}.attn.{projection}.lora_{factor}.weight", shape)
        for layer in range(layers)
        for projection in PROJECTIONS
        for factor, shape in (("A", (rank, hidden)), ("B", (hidden, rank)))
    ]


def flat_weights(shapes: Shapes, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, dict[str, Tensor]]:
    """One block and the tensors inside it, by name."""
    starts, at = [], 0
    for _, shape in shapes:
        starts.append(at)
        at += -(-math.prod(shape) // _ALIGN) * _ALIGN
    memory = torch.zeros(at, dtype=dtype, device=device)
    return memory, {
        name: memory[start : start + math.prod(shape)].view(shape)
        for (name, shape), start in zip(shapes, starts, strict=True)
    }


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Over order and every bit of the tensors; independent of the wire's own fingerprint."""
    total = 0
    for position, (_, tensor) in enumerate(tensors, start=1):
        for chunk in tensor.view(-1).view(torch.int16).split(_CHUNK):
            places = torch.arange(1, chunk.numel() + 1, device=chunk.device) % 8191
            total += position * int((chunk.to(torch.int64) * places).sum())
    return total


class SyncPair:
    """This process's weights, and the process that gets them."""

    def __init__(self, shapes: Shapes, device: str, mode: SyncMode):
        self.device, self.mode = device, mode
        self.memory, self.tensors = flat_weights(shapes, device)
        process, connection = start_process(receiver_main, shapes, device)
        self.client = PipeClient(connection, "receiver")
        self._senders: dict[int, WeightSender] = {}
        self._staging: dict[int, Tensor] = {}
        self._pointers: list[tuple[int, torch.device]] = []
        self._version = 0
        self._shapes = shapes
        weakref.finalize(self, _stop, process, connection, self._senders, self._pointers)

    def refill(self, seed: int) -> None:
        """New noise, as bits of finite values."""
        generator = torch.Generator(self.device).manual_seed(seed)
        self.memory.view(torch.int16).random_(-30000, 30000, generator=generator)

    def sync(self, bucket_mb: int) -> SyncReport:
        """Gather to commit, verified."""
        sender = self._senders.get(bucket_mb)
        if sender is None:
            transport = "cuda_ipc" if self.device == "cuda" else "shm"
            sender = self._senders[bucket_mb] = WeightSender(transport, bucket_size_mb=bucket_mb)
        self._version += 1
        manifest = sender.manifest(self._shapes, version=self._version, mode=self.mode)
        report = sender.send(self.tensors.items(), manifest, self.client)
        self.client.commit(self._version)
        return report

    def raw_copy(self, bucket_mb: int) -> None:
        """The same bytes through a kept buffer, a round trip for each bucket, nothing checked; CUDA only."""
        device, count = self.memory.device, bucket_mb * 2**20 // 2
        staging = self._staging.get(bucket_mb)
        if staging is None:
            pointer = cuda_memory.allocate(2 * count, device)
            self._pointers.append((pointer, device))
            staging = cuda_memory.as_tensor(pointer, 2 * count, device).view(torch.bfloat16)
            self._staging[bucket_mb] = staging
            self.client.call("raw_open", bucket_mb, cuda_memory.export(pointer, device).hex())
        for start in range(0, self.memory.numel(), count):
            part = self.memory[start : start + count]
            staging[: part.numel()].copy_(part)
            torch.cuda.synchronize()
            self.client.call("raw_take", bucket_mb, start, part.numel())

    def assert_equal(self) -> None:
        """Both processes hold the same bits."""
        ours, theirs = checksum(self.tensors.items()), self.client.call("checksum")
        assert ours == theirs, f"sender {ours}, receiver {theirs}"


def _stop(
    process: Any,
    connection: Connection,
    senders: dict[int, WeightSender],
    pointers: list[tuple[int, torch.device]],
) -> None:
    connection.close()  # the receiver lets go of our memory before we free it
    process.join(10)
    process.kill()
    for sender in senders.values():
        sender.close()
    for pointer, device in pointers:
        cuda_memory.free(pointer, device)


def receiver_main(connection: Connection, shapes: Sequence[tuple[str, Sequence[int]]], device: str) -> None:
    """A process that stands for an engine, with parameters of these shapes; runs until `connection` ends."""
    torch.set_num_threads(1)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    memory, tensors = flat_weights([(name, tuple(shape)) for name, shape in shapes], device)
    staging: dict[int, Tensor] = {}

    def raw_open(bucket_mb: int, handle: str) -> None:
        pointer = cuda_memory.open_exported(bytes.fromhex(handle), memory.device)
        staging[bucket_mb] = cuda_memory.as_tensor(pointer, bucket_mb * 2**20, memory.device).view(torch.bfloat16)

    def raw_take(bucket_mb: int, start: int, count: int) -> None:
        memory[start : start + count].copy_(staging[bucket_mb][:count])
        torch.cuda.synchronize()

    more = {"raw_open": raw_open, "raw_take": raw_take, "checksum": lambda: checksum(tensors.items())}
    serve(WeightReceiver(tensors, "receiver"), connection, more)
