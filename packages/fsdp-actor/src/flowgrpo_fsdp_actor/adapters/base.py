"""What a model family must say about itself: the `GenerativeModelAdapter` Protocol (A1) and the types it uses.

Shapes: G prompt groups, N candidates of a group, S trained steps, U stored states, B rows of a forward,
P packed image tokens, C channels of a token, L text tokens, E text width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowgrpo_rollout_sglang.config import SamplingConfig
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from torch import Tensor, nn

from flowgrpo_fsdp_actor.config import ActorConfig


@dataclass(frozen=True)
class TrainModel:
    """A model on the meta device and where its weights lie, so that no rank ever holds a whole copy."""

    module: nn.Module
    """Its parameters are on `meta`; everything that is not a parameter is real, on the CPU."""
    blocks: Sequence[str]
    """Names of the repeated blocks, in the order of the forward: the units of sharding and checkpointing."""
    read_weight: Callable[[str, int, int], Tensor]
    """(parameter name, first row, end row) -> those rows of the parameter, on the CPU, as stored on disk."""


@dataclass(frozen=True)
class PackedTrajectory:
    """One group as replay reads it: the two ends of each trained step and the frozen condition."""

    x_NSPC: Tensor
    """float32 latents x_k at the start of each trained step."""
    x_next_NSPC: Tensor
    """float32 latents x_{k+1} that the engine drew."""
    sigma_S: Tensor
    """float64 on the CPU: the schedule's sigma at each trained step."""
    sigma_next_S: Tensor
    """float64 on the CPU."""
    engine_logp_NS: Tensor
    """float32: the engine's own log-prob of x_next."""
    prompt_embeds_LE: Tensor
    """The text condition, unpadded."""
    step_indices: tuple[int, ...]
    """[S] positions of the trained steps in the schedule."""
    height: int
    """Pixels, as the engine echoed them."""
    width: int


@dataclass(frozen=True)
class ReplayConditions:
    """What a forward is conditioned on, for its B rows."""

    prompt_embeds_BLE: Tensor
    mask_BL: Tensor | None
    """bool, True on real tokens; None where no row is padded."""
    height: int
    width: int


class GenerativeModelAdapter(Protocol):
    """One model family. Made from a model folder, which it reads only when it is asked something."""

    family: str
    supported_tasks: tuple[str, ...]
    lora_target_modules: tuple[str, ...]
    """Suffixes of the module names that get a LoRA adapter by default."""
    artifact_tracks: tuple[str, ...]
    """What a trajectory decodes to: the scorers' `required_tracks` are among them."""

    def load_train_model(self, config: ActorConfig) -> TrainModel:
        """The trained part of the pipeline, without its weights. Raises ModelFolderError."""

    def build_rollout_request(
        self,
        *,
        prompt: str,
        group_index: int,
        group_size: int,
        sampling: SamplingConfig,
        rollout_id: int | None,
        generation_seed: int,
        sde_indices: tuple[int, ...] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> GroupRequest:
        """What an engine is asked for one prompt group. Raises RequestRefused."""

    def validate_rollout_response(self, trajectory: GroupTrajectory) -> None:
        """Raises TrajectoryRefused where replay could not score it."""

    def pack_trajectory(self, trajectory: GroupTrajectory) -> PackedTrajectory:
        """The validated trajectory in the form that replay reads. Raises TrajectoryRefused."""

    def replay_transition(
        self, model: nn.Module, latents_BPC: Tensor, sigma_B: Tensor, conditions: ReplayConditions
    ) -> Tensor:
        """The velocity [B, P, C] that the policy predicts; the only call of the model in training."""

    def weight_name_map(self, name: str) -> str:
        """The engine's name of one of our parameters (wrappers already stripped)."""
