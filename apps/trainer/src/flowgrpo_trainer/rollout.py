"""One rollout: prompts become groups of candidates, with their trajectories and pictures on disk.

Called by: `loop` through `--rollout-function-path`, while the engines hold the devices; `evaluate` for
held-out prompts. Next on the reading path: `flowgrpo_rewards/post_process.py`.

Shapes: G prompt groups, N candidates of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowgrpo_dataprep.source import Prompt
from flowgrpo_rewards import RewardSample
from flowgrpo_rollout_sglang.artifacts import ArtifactStore, GroupFiles
from flowgrpo_rollout_sglang.config import SamplingConfig
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_trainer.rows import make_rows


class EnginePool(Protocol):
    """All engines as one: `fleet.Engines`, or one engine in a test."""

    def generate(self, requests: Sequence[GroupRequest], on_group: Callable[[], None]) -> list[GroupTrajectory]:
        """Trajectories in the order of `requests`; `on_group` is called after each."""


@dataclass(frozen=True)
class RolloutContext:
    """What stays the same over all rollouts of a run."""

    engines: EnginePool
    adapter: Any
    """The GenerativeModelAdapter."""
    sampling: SamplingConfig
    generation_seed: int
    store: ArtifactStore
    weights_digest: Callable[[], str] = lambda: ""
    """Of the weights that serve now, for the candidates' manifests."""


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt's candidates, as the driver keeps them: paths and numbers, no large tensor."""

    prompt: Prompt
    group_index: int
    files: GroupFiles
    policy_version: int

    def samples(self) -> list[RewardSample]:
        """[N] what the scorer judges."""
        return [
            RewardSample(
                image=path,
                prompt=self.prompt.prompt,
                group_index=self.group_index,
                slot=slot,
                metadata=self.prompt.metadata,
            )
            for slot, path in enumerate(self.files.images)
        ]


def generate_rollout(
    context: RolloutContext,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    rollout_id: int | None,
    folder_id: int,
    on_group: Callable[[], None] = lambda: None,
) -> list[RolloutGroup]:
    """Draws `group_size` candidates of each prompt and writes their sidecars and pictures.

    The trained steps are resolved once, here, so every engine and rank has the same (T1). `rollout_id` None is
    an evaluation: fixed noise, no sidecar, files under `eval/`. `folder_id` numbers the folder.
    Raises EngineError, SidecarError and OSError; artifacts of earlier rollouts stay as they are.
    """
    steps = context.sampling.sde_steps(rollout_id)
    requests = [
        context.adapter.build_rollout_request(
            prompt=prompt.prompt,
            group_index=index,
            group_size=group_size,
            sampling=context.sampling,
            rollout_id=rollout_id,
            generation_seed=context.generation_seed,
            sde_indices=steps,
            metadata=prompt.metadata,
        )
        for index, prompt in enumerate(prompts)
    ]
    evaluation = rollout_id is None
    if not evaluation:
        context.store.prune_stale(folder_id)
    trajectories = context.engines.generate(requests, on_group)
    if not evaluation:
        for trajectory in trajectories:
            context.adapter.validate_rollout_response(trajectory)
    files = context.store.write_groups(
        folder_id, trajectories, evaluation=evaluation, weight_manifest_hash=context.weights_digest()
    )
    return [
        RolloutGroup(prompt, index, group_files, trajectory.policy_version)
        for index, (prompt, group_files, trajectory) in enumerate(zip(prompts, files, trajectories, strict=True))
    ]


def convert_samples_to_train_data(groups: Sequence[RolloutGroup], advantages_GN: Tensor, rollout_id: int) -> TensorDict:
    """[G * N] rows for the queue: numbers alone, the tensors stay in the sidecars (T2)."""
    if advantages_GN.shape[0] != len(groups):
        raise ValueError(f"{advantages_GN.shape[0]} rows of advantages for {len(groups)} groups")
    return make_rows(rollout_id, advantages_GN)
