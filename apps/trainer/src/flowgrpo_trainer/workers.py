"""The Ray workers: shells around plain classes, without logic of their own.

Called by: `fleet`, which places and starts them. Each runs in a process of its own; on one machine they take
turns (`colocation`), so each may use every core or the whole device in its turn.

Shapes: G prompt groups, N candidates of a group.
"""

import importlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_rewards import RewardConfig, RewardReport, RewardSample
from flowgrpo_rollout_sglang.artifacts import ArtifactStore
from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory

from flowgrpo_trainer.worker_logs import LogsToDriver

if TYPE_CHECKING:
    from flowgrpo_fsdp_actor.actor import UpdateReport
    from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree
    from flowgrpo_rollout_sglang.engine import RolloutEngine
    from flowgrpo_rollout_sglang.wire import FullWeightManifest, Shard, SyncReport


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@ray.remote
class RolloutWorker(LogsToDriver):
    """One engine. See `flowgrpo_rollout_sglang.engine.RolloutEngine` for every method's contract."""

    def __init__(self, class_path: str, config: EngineConfig):
        super().__init__()
        self._engine: RolloutEngine = _load(class_path)(config)

    def start(self) -> str:
        self._engine.start()
        return self._engine.name

    def generate(self, requests: Sequence[GroupRequest]) -> list[GroupTrajectory]:
        return self._engine.generate(requests)

    def policy_version(self) -> int:
        return self._engine.policy_version

    def sleep(self, tags: Sequence[str] | None = None) -> None:
        self._engine.sleep(tags)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        self._engine.wake(tags)

    def split(self) -> dict[str, int]:
        return self._engine.split()

    def begin(self, manifest: str, channel: str, *rank: int) -> None:
        self._engine.begin(manifest, channel, *rank)

    def verify(self, *rank: int) -> Any:
        return self._engine.verify(*rank)

    def commit(self, version: int) -> None:
        self._engine.commit(version)

    def abort(self, *rank: int) -> None:
        self._engine.abort(*rank)

    def stop(self) -> None:
        self._engine.stop()


@dataclass(frozen=True)
class SyncTarget:
    """Where a training rank's weights go: the engine of its card, and which of its ranks that is.

    What the rank's sender calls is the control half of a weight transaction, over Ray.
    """

    engine: Any
    engine_name: str
    rank: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        return self.engine_name if self.ranks == 1 else f"{self.engine_name}.{self.rank}"

    @property
    def _rank(self) -> tuple[int, ...]:
        """An engine of one device need not know of ranks."""
        return () if self.ranks == 1 else (self.rank,)

    def shards(self, shapes: Sequence[tuple[str, Sequence[int]]]) -> "dict[str, Shard]":
        """What the engine's rank holds of each tensor; not named is what it holds whole."""
        if self.ranks == 1:
            return {}
        from flowgrpo_rollout_sglang.wire import even_shards

        return even_shards(shapes, ray.get(self.engine.split.remote()), self.rank, self.ranks)

    def begin(self, manifest: str, channel: str) -> None:
        ray.get(self.engine.begin.remote(manifest, channel, *self._rank))

    def verify(self) -> Any:
        return ray.get(self.engine.verify.remote(*self._rank))

    def commit(self, version: int) -> None:
        ray.get(self.engine.commit.remote(version))

    def abort(self) -> None:
        ray.get(self.engine.abort.remote(*self._rank))


@ray.remote
class ActorWorker(LogsToDriver):
    """One training rank. Every method is collective: the driver calls it on all ranks or on none."""

    def __init__(self, config: ActorConfig, store: ArtifactStore, rank: int, world_size: int):
        super().__init__()
        self._config, self._store = config, store
        self._rank, self._world_size = rank, world_size

    def address(self) -> tuple[str, int]:
        """Where rank 0 can be met: this node, and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def place(self) -> tuple[str, str]:
        """The node of this rank, and its CUDA_VISIBLE_DEVICES: the card that an engine must take to be beside it."""
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def reads(self, paths: Sequence[Path]) -> tuple[str, list[str]]:
        """This rank's node, and what it finds in files that the driver has written; "" where it finds none."""
        return ray.util.get_node_ip_address(), [_text(path) for path in paths]

    def host_memory(self) -> tuple[str, int]:
        """The node of this rank, and the bytes of host memory that are available there."""
        from flowgrpo_trainer.host_memory import available_bytes

        return ray.get_runtime_context().get_node_id(), available_bytes()

    def start(self, master: tuple[str, int], wire: dict[str, Any]) -> None:
        """Joins the process group, loads and shards the model, attaches to the rows.

        Raises: ActorError with what is wrong with the model or the settings.
        """
        from flowgrpo_fsdp_actor.actor import FsdpActor
        from flowgrpo_fsdp_actor.distributed import init_process_group
        from flowgrpo_rollout_sglang.wire import WeightSender

        init_process_group(self._rank, self._world_size, *master, device=self._config.device)
        self._actor = FsdpActor(self._config, rank=self._rank, world_size=self._world_size)
        self._sender = WeightSender(**wire)
        self._last_manifest: FullWeightManifest | None = None

    def attach_rows(self) -> None:
        """Attaches to TransferQueue, once the driver has started it."""
        from flowgrpo_trainer.rows import RowTaker

        self._rows = RowTaker(self._rank)

    def read_ahead(self, rollout_id: int, G: int) -> None:
        """Starts reading the rollout's sidecars; `update` raises what is wrong with them."""
        self._actor.read_ahead([self._store.sidecar_path(rollout_id, group) for group in range(G)])

    def update(self, rollout_id: int, G: int, N: int) -> "UpdateReport":
        """Replays one rollout and takes its optimizer steps.

        Called by: `loop.train`, after rewards, while the engines sleep.
        Needs:     the actor awake; the rows of `rollout_id` put; its sidecars readable on this host.
        Leaves:    the weights moved; the engines still hold the old policy until `sync.publish`.
        Raises:    RowsError, SidecarError, ReplayMismatch, on all ranks together.
        """
        advantages_GN = self._rows.take(rollout_id, G, N)
        sidecars = [self._store.sidecar_path(rollout_id, group) for group in range(G)]
        return self._actor.update(rollout_id, sidecars, advantages_GN)

    def parity(self, rollout_id: int, G: int) -> dict[int, float]:
        """Largest |ratio - 1| between engine and replay per SDE step; moves nothing."""
        sidecars = [self._store.sidecar_path(rollout_id, group) for group in range(G)]
        return self._actor.replay_parity(sidecars, join=self._config.n_samples_per_prompt)

    def send_weights(
        self, version: int, base_version: int | None, target: SyncTarget, must_change: bool
    ) -> "SyncReport":
        """Gathers the policy and sends it to this rank's engine, up to and including verify; commits nothing.

        Raises: WeightSyncError naming the engine, the version and the tensors.
        """
        from flowgrpo_rollout_sglang.wire import sharded_shapes

        def manifest_of(shapes: Iterable[tuple[str, Sequence[int]]]) -> "FullWeightManifest":
            mode = "adapter" if self._config.lora_adapter_mode else "full"
            return self._sender.manifest(shapes, version=version, mode=mode, base_version=base_version)

        entries = self._actor.wire_manifest_entries()
        manifest, shards = manifest_of(entries), target.shards(entries)
        self._last_manifest = manifest  # of the policy, however engines divide it
        if shards:
            manifest = manifest_of(sharded_shapes(entries, shards))
        return self._actor.send_weights(self._sender, manifest, target, shards=shards, must_change=must_change)

    def save_checkpoint(
        self, tree: "CheckpointTree", n: int, state: dict[str, Any], contract: dict[str, Any], history: str
    ) -> None:
        """Writes and commits iteration `n`. Raises CheckpointError on every rank if any could not write."""
        from flowgrpo_fsdp_actor.checkpoint_files import save_checkpoint

        documents = {
            "trainer_state.json": state | {"lr_scheduler_steps": self._actor.lr_scheduler_steps},
            "weight_sync_manifest.json": json.loads(self._last_manifest.to_json()) if self._last_manifest else {},
            "adapter_contract.json": contract,
        }
        save_checkpoint(self._actor, tree, n, documents, history)

    def rotate(self, tree: "CheckpointTree", keep: int) -> list[int]:
        from flowgrpo_fsdp_actor.checkpoint_files import rotate

        return rotate(tree, keep)

    def load_checkpoint(self, tree: "CheckpointTree", n: int) -> None:
        """Takes weights, optimizer state, lr steps and RNG of iteration `n`. Raises CheckpointError."""
        from flowgrpo_fsdp_actor.checkpoint_files import load_checkpoint

        load_checkpoint(self._actor, tree, n)

    def publish_succeeded(self, version: int) -> None:
        self._actor.publish_succeeded(version)

    def publish_failed(self) -> None:
        """The version stays, so that a retry builds the same number."""
        self._actor.publish_failed()

    def sleep(self) -> None:
        self._actor.sleep()

    def wake(self) -> None:
        self._actor.wake()

    def stop(self) -> None:
        import torch.distributed

        self._sender.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@ray.remote
class RewardWorker(LogsToDriver):
    """The scorer, loaded once, and the reward step around it."""

    def __init__(self, config: RewardConfig, post_process_path: str):
        super().__init__()
        self._config, self._post_process_path = config, post_process_path

    def start(self) -> tuple[str, ...]:
        """Loads the scorer; returns its components. Raises ScorerLoadError, ScorerContractError."""
        from flowgrpo_rewards import load_scorer
        from flowgrpo_rewards.post_process import check_components, post_process

        self._scorer = load_scorer(self._config)
        self._post_process = _load(self._post_process_path)
        if self._post_process is post_process:  # which would refuse it at the first rollout
            check_components(self._config, self._scorer)
        return self._scorer.components

    def score(self, groups: list[list[RewardSample]]) -> RewardReport:
        """Raises GroupRewardError, RewardTimeoutError, RewardEndpointError, ScorerContractError."""
        return self._post_process(groups, self._scorer, self._config)
