"""The actor of one training rank: it owns the policy's shard, moves it, publishes it, and lends its memory out.

A plain class: apps/trainer wraps it in a Ray worker without adding logic. Every public method is collective
unless it says otherwise: all ranks call it, with the same arguments. A rank that raises ends them all, with that
error (`distributed.fail_together`).
Reading path: `plan` -> `replay` -> `update`.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flowgrpo_rollout_sglang.request import GroupTrajectory
from flowgrpo_rollout_sglang.wire import FullWeightManifest, Shard, SyncReport, WeightSender, sharded
from flowgrpo_rollout_sglang.wire.sender import WeightReceiverClient
from torch import Tensor

from flowgrpo_fsdp_actor import checkpoint
from flowgrpo_fsdp_actor.adapters import load_adapter
from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.distributed import agree, fail_together
from flowgrpo_fsdp_actor.errors import ActorAsleep, ConfigRefused, PlanError
from flowgrpo_fsdp_actor.join import CUDA_TOKENS, ForwardLimit, choose_join
from flowgrpo_fsdp_actor.metrics import memory_metrics
from flowgrpo_fsdp_actor.optimizer import local, lr_at_step, make_adamw
from flowgrpo_fsdp_actor.out_of_memory import GATHER, LOADING, PARITY, SLEEP, WAKE
from flowgrpo_fsdp_actor.plan import MicroBatch, plan_updates
from flowgrpo_fsdp_actor.publish import Publisher
from flowgrpo_fsdp_actor.recompute import recomputing
from flowgrpo_fsdp_actor.replay import Replay
from flowgrpo_fsdp_actor.sharding import build_policy, reshard
from flowgrpo_fsdp_actor.sidecars import SidecarReader
from flowgrpo_fsdp_actor.sleep import DeviceMemory
from flowgrpo_fsdp_actor.update import Policy, is_degenerate, run_updates

log = logging.getLogger(__name__)
PARITY_JOIN = 16


@dataclass(frozen=True)
class UpdateReport:
    """What one `update` did; the same on every rank."""

    metrics: dict[str, float]
    """Series of requirements section 12, reduced over the ranks."""
    policy_version: int
    """The version that the weight sync is to publish now."""


class FsdpActor:
    """One training rank. `init_process_group` of this package must have run (any initialised group will do)."""

    def __init__(self, config: ActorConfig, rank: int, world_size: int):
        if problems := tuple(str(problem) for problem in config.problems()):
            raise ConfigRefused(problems)
        self.config, self.rank, self.world_size = config, rank, world_size
        self.policy_version = 0
        """The last version that every engine committed."""
        self.weight_sync_failures = 0
        self._device = torch.device(config.device, torch.cuda.current_device() if config.device == "cuda" else None)
        self._adapter = load_adapter(config.model_adapter_path, config.model_path)
        if config.generation_task not in self._adapter.supported_tasks:
            raise ConfigRefused((f"{self._adapter.family} cannot train the task {config.generation_task!r}",))
        with fail_together(LOADING):
            module, blocks = build_policy(config, self._adapter, rank, world_size)
        trainable = [p for p in module.parameters() if p.requires_grad]
        self._policy = Policy(module, trainable, make_adamw(config, trainable), blocks)
        self._publisher = Publisher(config, self._adapter, module)
        self._memory = DeviceMemory()
        self._sidecars = SidecarReader()
        self._limit: ForwardLimit | None = None

    # ------------------------------------------------------------------ training

    def read_ahead(self, sidecars: Sequence[Path | str]) -> None:
        """Starts reading the sidecars of the next `update`, in threads; asleep or awake. Returns at once.

        A file that cannot be read is an error of that update, on all ranks together.
        """
        self._sidecars.read_ahead(sidecars)

    def update(
        self, rollout_id: int, sidecars: Sequence[Path | str | GroupTrajectory], advantages_GN: Tensor
    ) -> UpdateReport:
        """Replays one rollout and takes its optimizer steps.

        Called by: the loop, after rewards, while the engines sleep.
        Needs:     the actor awake; `sidecars` readable on this host, one per group, in the same order on every
                   rank, and the advantages [G, N] in that order.
        Leaves:    the weights moved by `num_updates_per_batch` optimizer steps (none in a degenerate rollout);
                   the engines still hold the old policy until the sync of `policy_version` of the report.
        Raises:    PlanError, TrajectoryRefused, SidecarError before any weight moved; ReplayMismatch under
                   `fsdp_debug_fingerprint` if the first update's ratio is not exactly 1.
        """
        self._must_be_awake("update")
        started = time.perf_counter()
        config = self.config
        if is_degenerate(advantages_GN):
            log.warning("[update] rollout %d has no advantage variance: no optimizer step was taken", rollout_id)
            steps = {"train/optimizer_steps": 0.0, "train/optimizer_skips": float(config.num_updates_per_batch)}
            return self._report(steps | {"train/lr": lr_at_step(self._policy.lr_scheduler_steps, config)})
        with agree(f"preparing rollout {rollout_id}"):
            replay = self._replay(sidecars, advantages_GN)
            G, N = advantages_GN.shape
            plan = self._plan(G, N, num_updates=config.num_updates_per_batch)
        with fail_together(f"the update of rollout {rollout_id}"):
            join = config.replay_join or self._chosen_join(replay, plan)
            if self._device.type == "cuda":  # the peak of this update, not of the probes or of an earlier one
                torch.cuda.reset_peak_memory_stats(self._device)
            metrics = run_updates(self._policy, replay, plan, join, config, f"rollout {rollout_id}")
            metrics |= memory_metrics(self._device)
        seconds = time.perf_counter() - started
        transitions = N * sum(shape.num_steps for shape in replay.shapes)
        speed = {"perf/train_transitions_per_s": transitions / seconds, "perf/train_samples_per_s": G * N / seconds}
        return self._report(metrics | speed)

    def _chosen_join(self, replay: Replay, plan: Sequence[Sequence[MicroBatch]]) -> int:
        """Rows of a forward of this rollout. The first one is measured, for the run."""
        self._limit = self._limit or choose_join(self._policy, replay, plan, self.config)
        return self._limit.rows_of(replay, plan)

    def replay_parity(
        self, sidecars: Sequence[Path | str | GroupTrajectory], join: int | None = None
    ) -> dict[int, float]:
        """Largest |ratio - 1| of replay against the engine's own log-prob, by trained step index. Moves nothing.

        `join` is as `replay_join`, which it does not exceed; the engine's own batch (its candidates per forward) is the
        closest. Compiled replay is checked compiled: other sizes of a forward than the training's cost a compilation
        each. On a GPU it takes little memory, for nothing is known of that yet: all blocks recompute, and a forward
        has no more tokens than fill the GPU.
        """
        self._must_be_awake("replay_parity")
        with agree("preparing the parity check"):
            replay = self._replay(sidecars, None)
            plan = self._plan(*replay.groups_and_candidates, num_updates=1)
        most = self.config.replay_join
        rows = min(join or PARITY_JOIN, most) if most else join or PARITY_JOIN
        if self._device.type == "cuda":
            rows = ForwardLimit(range(1, rows + 1), CUDA_TOKENS).rows_of(replay, plan)
        with fail_together(PARITY), recomputing(self._policy.blocks):
            found = replay.parity(self._policy.module, plan[0], rows)
            reshard(self._policy.module)  # the engine, which may be next, needs that memory
        return found

    def _plan(self, num_groups: int, group_size: int, *, num_updates: int) -> tuple[tuple[MicroBatch, ...], ...]:
        return plan_updates(
            num_groups,
            group_size,
            rank=self.rank,
            world_size=self.world_size,
            num_updates=num_updates,
            micro_batch_size=self.config.micro_batch_size,
        )

    def _replay(self, sidecars: Sequence[Path | str | GroupTrajectory], advantages_GN: Tensor | None) -> Replay:
        groups = [self._adapter.pack_trajectory(trajectory) for trajectory in self._sidecars.read(sidecars)]
        sizes = {group.x_NSPC.shape[0] for group in groups}
        if advantages_GN is None:
            advantages_GN = torch.zeros(len(groups), max(sizes, default=0))
        if tuple(advantages_GN.shape) != (len(groups), *sizes):
            raise PlanError(
                f"advantages of shape {list(advantages_GN.shape)}, {len(groups)} groups of {sorted(sizes)} candidates",
                "give one advantage per candidate; all groups need the same number of candidates",
            )
        return Replay(
            self._adapter,
            groups,
            advantages_GN,
            self.config.sampling,
            self._device,
            compiled=self.config.compiles,
        )

    def _report(self, metrics: dict[str, float]) -> UpdateReport:
        version = self.policy_version + 1
        counts = {
            "train/policy_version": float(version),
            "train/weight_sync_failures": float(self.weight_sync_failures),
        }
        return UpdateReport(metrics=metrics | counts, policy_version=version)

    # ------------------------------------------------------------------ weight sync

    def wire_manifest_entries(self) -> list[tuple[str, tuple[int, ...]]]:
        """(wire name, shape) of every tensor that a sync sends, in order. Not collective; moves nothing."""
        return self._publisher.entries()

    def wire_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(wire name, whole tensor) in the order of the manifest; each is valid as long as it is held.

        To be taken to the end on every rank: the gathers inside are collective.
        """
        self._must_be_awake("wire_tensors")
        with fail_together(GATHER):
            yield from self._publisher.tensors()

    def send_weights(
        self,
        sender: WeightSender,
        manifest: FullWeightManifest,
        receiver: WeightReceiverClient,
        *,
        shards: Mapping[str, Shard] | None = None,
        must_change: bool = False,
    ) -> SyncReport:
        """Gathers the policy and sends it to this rank's engine, up to and including verify; commits nothing.

        Where several ranks share an engine, each sends what the engine holds on its card: `shards`, by wire name, and
        what is not named whole; the manifest is of those shapes. A rank whose engine fails still takes part in the
        gather to its end: the other ranks, whose engines are well, wait for its shards.
        Raises: WeightSyncError naming the engine, the version and the tensors.
        """
        tensors = self.wire_tensors()
        try:
            return sender.send(sharded(tensors, shards or {}), manifest, receiver, must_change=must_change)
        finally:
            for _ in tensors:
                pass

    def publish_succeeded(self, version: int) -> None:
        """Every engine committed `version`: it is the policy's version from now on. Not collective."""
        self.policy_version = version

    def publish_failed(self) -> None:
        """No engine committed: the version stays, so that a retry builds the same number. Not collective."""
        self.weight_sync_failures += 1

    # ------------------------------------------------------------------ sleep and wake

    def sleep(self) -> int:
        """Gives the device memory of weights and optimizer back; returns the bytes freed. Not collective."""
        with fail_together(SLEEP):
            self._policy.optimizer.zero_grad(set_to_none=True)
            reshard(self._policy.module)
            frozen = [local(p) for p in self._policy.module.parameters() if not p.requires_grad]
            trained = [local(p.data) for p in self._policy.trainable]
            moments = [local(t) for s in self._policy.optimizer.state.values() for t in s.values()]
            trained += [t for t in moments if t.device.type == self._device.type]
            freed = self._memory.sleep(trained, frozen)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return freed

    def wake(self) -> int:
        """Brings back what `sleep` freed, bit for bit; returns the bytes restored. Not collective."""
        with fail_together(WAKE):
            return self._memory.wake()

    @property
    def asleep(self) -> bool:
        return self._memory.asleep

    def _must_be_awake(self, asked: str) -> None:
        if self.asleep:
            raise ActorAsleep(asked)

    # ------------------------------------------------------------------ checkpoints

    @property
    def lr_scheduler_steps(self) -> int:
        """Optimizer steps taken so far: what the learning rate depends on."""
        return self._policy.lr_scheduler_steps

    @lr_scheduler_steps.setter
    def lr_scheduler_steps(self, steps: int) -> None:
        self._policy.lr_scheduler_steps = steps

    def checkpoint_state(self) -> dict[str, dict[str, Tensor]]:
        """The live trainable weights and AdamW state, for DCP to write or to read into (`checkpoint`)."""
        self._must_be_awake("checkpoint_state")
        return checkpoint.checkpoint_state(self._policy.module, self._policy.optimizer)

    def load_checkpoint_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Takes a state of the form of `checkpoint_state`. Raises CheckpointMismatch."""
        self._must_be_awake("load_checkpoint_state")
        checkpoint.load_checkpoint_state(self._policy.module, self._policy.optimizer, state)

    def rng_state(self) -> dict[str, Any]:
        """This rank's random states. Replay and update draw nothing; kept so that a resume is complete."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return {"torch": torch.get_rng_state(), "cuda": cuda}

    def load_rng_state(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)
