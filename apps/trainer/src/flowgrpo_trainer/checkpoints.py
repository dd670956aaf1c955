"""When checkpoints are written, and what a resume takes from one. How they lie on disk is in
`flowgrpo_fsdp_actor.checkpoint_files`.

Everything else of a run is a function of its settings and the rollout id (prompts, noise, trained steps), so
weights, optimizer, counters and RNG are all that a checkpoint needs for the run to go on bit for bit.
Called by: `loop.train` (save), `session` (resume).
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from flowgrpo_fsdp_actor.checkpoint_files import HISTORY, CheckpointTree, read_documents
from flowgrpo_fsdp_actor.contract import adapter_contract, assert_resumable, base_model_hash
from flowgrpo_fsdp_actor.errors import CheckpointError

from flowgrpo_trainer.errors import in_words
from flowgrpo_trainer.fleet import Fleet
from flowgrpo_trainer.settings import Settings
from flowgrpo_trainer.sync import Publisher
from flowgrpo_trainer.wiring import actor_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resume:
    """A committed checkpoint that these settings may go on from."""

    tree: CheckpointTree
    iteration: int
    state: dict[str, Any]

    @classmethod
    def find(cls, settings: Settings, contract: dict[str, Any]) -> "Resume | None":
        """The newest committed checkpoint of `--load`; None without `--load`.

        Read by the driver before a worker starts. Raises CheckpointError (none there, or spoilt) and NotResumable
        (another mode, base model, LoRA rank, alpha, dropout or targets), never starts afresh instead.
        """
        if settings.checkpoint.load is None:
            return None
        tree = CheckpointTree(Path(settings.checkpoint.load).absolute(), settings.model.generation_task or "")
        iteration = tree.newest()
        documents = read_documents(tree.iteration(iteration))
        assert_resumable(documents["adapter_contract.json"], contract, str(tree.iteration(iteration)))
        return cls(tree, iteration, documents["trainer_state.json"])

    @property
    def next_rollout(self) -> int:
        return self.state["rollout_id"] + 1

    def history(self) -> str:
        """The metrics of the run up to this checkpoint."""
        return (self.tree.iteration(self.iteration) / HISTORY).read_text()

    def changes(self, settings: Settings, prompt_fingerprint: str) -> list[str]:
        """What differs from the saved run and may differ on purpose, in words."""
        now = {
            "sampling_fingerprint": settings.rollout.sampling_config.fingerprint(),
            "prompt_fingerprint": prompt_fingerprint,
            "rollout_seed": settings.rollout.rollout_seed,
            "generation_seed": settings.rollout.generation_seed,
        }
        return [
            f"resuming with another {name.replace('_', ' ')} than the saved run: the curve will not be the one it had"
            for name, value in now.items()
            if self.state.get(name) != value
        ]

    def restore(self, fleet: Fleet, publisher: Publisher) -> None:
        """Weights, optimizer, counters and RNG into every rank; the policy to every engine."""
        with fleet.colocation.actor_holds_gpus():
            ray.get([actor.load_checkpoint.remote(self.tree, self.iteration) for actor in fleet.actors])
            publisher.publish_restored(fleet, self.state["policy_version"])


def refuse_checkpoints_of_another_run(settings: Settings, resume: Resume | None) -> None:
    """A run saves into an empty folder, or into the one that it goes on from.

    Elsewhere rotation would count another run's checkpoints and remove its own, as the oldest; the next --load would go
    on with whichever iteration is the newest. Read by the driver before a worker starts. Raises CheckpointError.
    """
    tree = save_tree(settings)
    if tree is None or not (committed := tree.committed()):
        return
    if resume is not None and os.path.realpath(resume.tree.folder) == os.path.realpath(tree.folder):
        return  # whose newest was taken: none of its iterations comes again
    raise CheckpointError(
        str(tree.folder),
        f"holds committed checkpoints of another run, the newest {tree.iteration(committed[-1]).name}",
        f"--load {tree.save} goes on with that run; for this one give another --save, or move the folder away",
    )


@dataclass
class Checkpoints:
    """The checkpoints of one run."""

    tree: CheckpointTree
    contract: dict[str, Any]
    constant: dict[str, Any]
    """What trainer_state.json says of the run and never changes."""
    interval: int
    keep: int | None
    """Checkpoints that rotation leaves; None rotates nothing."""
    total: int
    history: Callable[[], str]
    failures: int = 0

    def metrics(self) -> dict[str, float]:
        return {"train/checkpoint_failures": float(self.failures)}

    def outcome(self) -> str:
        """What the end of the run must say: a failure after the last rollout stands in no line of the metrics."""
        if not self.failures:
            return ""
        committed = self.tree.committed()
        newest = f"the newest is {self.tree.iteration(committed[-1])}" if committed else "none was committed"
        return f"warning: {self.failures} checkpoint{'s' * (self.failures > 1)} could not be written; {newest}"

    def save_if_due(self, fleet: Fleet, rollout_id: int, version: int) -> None:
        """Saves after every `interval` rollouts and after the last.

        A failed write is logged and counted, and training goes on (C2); a failed rotation raises.
        """
        if (rollout_id + 1) % self.interval and rollout_id + 1 != self.total:
            return
        state = self.constant | {"rollout_id": rollout_id, "policy_version": version}
        history = self.history()
        with fleet.colocation.actor_holds_gpus():
            if self.keep is not None:
                ray.get([actor.rotate.remote(self.tree, self.keep) for actor in fleet.actors])
            saves = [
                actor.save_checkpoint.remote(self.tree, rollout_id, state, self.contract, history)
                for actor in fleet.actors
            ]
            try:
                ray.get(saves)
            except CheckpointError as error:
                self.failures += 1
                log.error("CHECKPOINT FAILED, training goes on: %s", in_words(error))


class NoCheckpoints:
    """A run without `--save`."""

    def metrics(self) -> dict[str, float]:
        return {"train/checkpoint_failures": 0.0}

    def outcome(self) -> str:
        return ""

    def save_if_due(self, fleet: Fleet, rollout_id: int, version: int) -> None:
        """Nothing is due."""


def contract_of(settings: Settings, targets: tuple[str, ...]) -> dict[str, Any]:
    """This run's adapter_contract.json."""
    model = Path(settings.model.model_path or "")
    fingerprint = base_model_hash(model, settings.model.model_revision, settings.fsdp.fsdp_trainable_attr)
    return adapter_contract(actor_config(settings, device="cpu"), targets, fingerprint)


def checkpoints_of(
    settings: Settings, contract: dict[str, Any], prompt_fingerprint: str, history: Callable[[], str]
) -> Checkpoints | NoCheckpoints:
    """What `--save` asks for."""
    checkpoint, tree = settings.checkpoint, save_tree(settings)
    if tree is None:
        return NoCheckpoints()
    return Checkpoints(
        tree=tree,
        contract=contract,
        constant={
            "task": tree.task,
            "adapter": settings.model.model_adapter_path,
            "model_revision": settings.model.model_revision,
            "sampling_fingerprint": settings.rollout.sampling_config.fingerprint(),
            "prompt_fingerprint": prompt_fingerprint,
            "rollout_seed": settings.rollout.rollout_seed,
            "generation_seed": settings.rollout.generation_seed,
        },
        interval=checkpoint.save_interval,
        keep=checkpoint.max_actor_ckpt_to_keep if checkpoint.rotate_ckpt else None,
        total=settings.run.num_rollouts,
        history=history,
    )


def save_tree(settings: Settings) -> CheckpointTree | None:
    """Where this run saves; None without `--save`."""
    if settings.checkpoint.save is None:
        return None
    return CheckpointTree(Path(settings.checkpoint.save).absolute(), settings.model.generation_task or "")
