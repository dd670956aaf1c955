"""Ranks that hold a policy under FSDP2, each with an engine's stand-in on its own card, for the case weight_sync_fsdp.

Every rank is a process, and so is every receiver. A rank gathers the policy as the trainer's does
(`flowgrpo_fsdp_actor.publish`) and sends it to the receiver of its own card; when all have verified, all commit.
"""

import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from flowgrpo_fsdp_actor import ActorConfig
from flowgrpo_fsdp_actor.publish import Publisher
from flowgrpo_rollout_sglang.wire import SyncReport, WeightSender
from flowgrpo_rollout_sglang.wire.testing import PipeClient, start_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from flowgrpo_bench.ranks import Ranks
from flowgrpo_bench.weight_sync import Shapes, checksum, qwen_image_shapes, receiver_main

FLOOR_BYTES = 2**31
"""Output of one all-gather of the floor."""


class FsdpSync:
    """`world` ranks and as many receivers; driven from this process, which holds no weight."""

    def __init__(self, device: str, world: int, *, layers: int, hidden: int):
        shapes = qwen_image_shapes(layers, hidden)
        cards = [f"cuda:{rank}" if device == "cuda" else device for rank in range(world)]
        receivers = [start_process(receiver_main, shapes, card) for card in cards]
        controls = [control for _, control in receivers]
        self._ranks = Ranks(world, device, _Rank, shapes, controls)
        for control in controls:  # the ranks have them now: with the ranks they end, and with them the receivers
            control.close()
        weakref.finalize(self, _end, self._ranks, [process for process, _ in receivers])
        self._version = 0
        self.reports: list[SyncReport] = []
        """Of the last sync, one a rank."""

    def all(self, command: str, *arguments: Any) -> list[Any]:
        """What every rank answers. Raises RuntimeError with the first rank's words that failed."""
        return self._ranks.all(command, *arguments)

    def sync(self, bucket_mb: int, gathered_by: str = "ours") -> None:
        """Gather to commit, verified, on every rank and its engine at once."""
        self._version += 1
        self.reports = self.all("send", self._version, bucket_mb, gathered_by)
        self.all("commit", self._version)

    def assert_equal(self) -> None:
        """Every engine holds what the ranks hold together, by another gather and another sum than the sync's."""
        for rank, (ours, theirs) in enumerate(self.all("checksums")):
            assert ours == theirs, f"rank {rank}: policy {ours}, engine {theirs}"


class _Rank:
    """One rank; its methods are the commands."""

    def __init__(self, rank: int, world: int, device: str, shapes: Shapes, controls: list[Connection]):
        self._device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        self._policy = _sharded_policy(shapes, device, world)
        config = ActorConfig(model_path="", device="cuda" if device == "cuda" else "cpu")
        self._publisher = Publisher(config, _PlainNames(), self._policy)  # ty: ignore[invalid-argument-type]
        self._client = PipeClient(controls[rank], f"engine{rank}")
        self._senders: dict[int, WeightSender] = {}
        self._rank = rank

    @torch.no_grad()
    def refill(self, seed: int) -> None:
        """New noise in every shard, as finite values."""
        generator = torch.Generator(self._device).manual_seed(1000 * seed + self._rank)
        for parameter in self._policy.parameters():
            parameter.to_local().uniform_(-1, 1, generator=generator)

    def send(self, version: int, bucket_mb: int, gathered_by: str) -> SyncReport:
        sender = self._senders.get(bucket_mb)
        if sender is None:
            transport = "cuda_ipc" if self._device.type == "cuda" else "shm"
            sender = self._senders[bucket_mb] = WeightSender(transport, bucket_size_mb=bucket_mb)
        manifest = sender.manifest(self._publisher.entries(), version=version)
        tensors = self._publisher.tensors() if gathered_by == "ours" else self._by_unshard()
        return sender.send(tensors, manifest, self._client)

    def commit(self, version: int) -> None:
        self._client.commit(version)

    @torch.no_grad()
    def _by_unshard(self) -> Iterator[tuple[str, Tensor]]:
        """FSDP's own gather, unit by unit; a bucket may span units, so what goes with its unit is copied."""
        blocks = list(self._policy.get_submodule("transformer_blocks").children())
        owner = {id(p): block for block in blocks for p in block.parameters()}
        units: list[tuple[nn.Module, list[str]]] = []
        for name, parameter in self._policy.named_parameters():
            unit = owner.get(id(parameter), self._policy)
            if not units or units[-1][0] is not unit:
                units.append((unit, []))
            units[-1][1].append(name)
        for unit, names in units:
            assert isinstance(unit, FSDPModule)
            unit.unshard()
            for name in names:
                module, _, leaf = name.rpartition(".")
                yield name, getattr(self._policy.get_submodule(module), leaf).detach().clone()
            unit.reshard()

    def gather_alone(self) -> None:
        """The floor: as many bytes through all_gather_into_tensor, and nothing else."""
        left = sum(2 * p.numel() for p in self._policy.parameters())
        whole = torch.empty(min(left, FLOOR_BYTES), dtype=torch.uint8, device=self._device)
        shard = torch.ones(whole.numel() // dist.get_world_size(), dtype=torch.uint8, device=self._device)
        whole = whole[: shard.numel() * dist.get_world_size()]
        while left > 0:
            dist.all_gather_into_tensor(whole, shard)
            left -= whole.numel()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def checksums(self) -> tuple[int, int]:
        """Of the policy, gathered tensor by tensor, and of this rank's engine."""
        whole = ((name, p.full_tensor()) for name, p in self._policy.named_parameters())
        return checksum(whole), self._client.call("checksum")


class _PlainNames:
    """The part of a model adapter that publishing asks."""

    def weight_name_map(self, name: str) -> str:
        return name


def _sharded_policy(shapes: Shapes, device: str, world: int) -> nn.Module:
    """Modules with bf16 parameters of these names and nothing to compute, sharded by block as the actor's policy is."""
    root = nn.Module()
    for name, shape in shapes:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
    mesh = init_device_mesh(device, (world,))
    for block in root.get_submodule("transformer_blocks").children():
        fully_shard(block, mesh=mesh)
    return fully_shard(root, mesh=mesh).to_empty(device=device)


def _end(ranks: Ranks, receivers: list[Any]) -> None:
    ranks.stop()
    for process in receivers:
        process.join(10)
        process.kill()
