"""What goes into an engine and what comes out, for one prompt group.

Shapes: N candidates of a group, T denoising steps, S trained steps, U stored states, P packed image tokens,
C latent channels of a token, L text tokens, E text width, H x W pixels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowgrpo_rollout_sglang.config import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt and its N candidates: everything that decides which images are drawn."""

    group_index: int
    """Position of the group in its rollout; names its files."""
    prompt: str
    sample_ids: tuple[str, ...]
    """[N], all different. With `noise_seed` it fixes a candidate's x_T and step noise, whatever batch or engine."""
    sampling: SamplingConfig
    sigmas: tuple[float, ...]
    """[T + 1], from 1 down to 0: the schedule that the engine uses as it is."""
    sde_indices: tuple[int, ...]
    """[S] steps sampled with noise and trained, sorted; the other steps are Euler steps."""
    noise_seed: int
    """Base of all noise of this request. Differs from rollout to rollout, constant over evaluations."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's own metadata, passed on to the scorer."""

    @property
    def state_indices(self) -> tuple[int, ...]:
        """[U] positions k of the latents x_k that replay needs: both ends of each trained step, sorted."""
        return tuple(sorted({k + d for k in self.sde_indices for d in (0, 1)}))


@dataclass(frozen=True, kw_only=True)
class GroupTrajectory:
    """What an engine returns for a GroupRequest, and what a sidecar stores (without the images)."""

    request: GroupRequest
    height: int
    """Pixels, echoed by the engine: the only source of the latent grid."""
    width: int
    sigmas: Tensor
    """[T + 1] float32, the sigmas the engine really used."""
    latents_NUPC: Tensor
    """float32 packed latents x_k for k in `request.state_indices`."""
    log_probs_NS: Tensor
    """float32, nats per latent element, of the stored latents under the engine's own policy."""
    prompt_embeds_LE: Tensor
    """The frozen text condition, unpadded."""
    images_NHWC: Tensor | None
    """uint8 decoded pictures; None once read back from a sidecar, where they lie beside it as PNG."""
    policy_version: int
    """Version of the weights that drew these images."""
