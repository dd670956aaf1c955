"""The trajectory sidecar: one safetensors file a group, written by the driver, read by every training rank.

Namespaces: `common.*` (schedule), `conditions.*` (the frozen text), `tracks.*` (per candidate). Everything
that is not a tensor (request, policy version, one small manifest per candidate) is JSON in the header.
Called by: `artifacts`; read by the actor's replay. Next on the reading path: `artifacts`.

Shapes: as in `request`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowgrpo_rollout_sglang.config import SamplingConfig
from flowgrpo_rollout_sglang.files import write_atomic
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory

FORMAT = "flowgrpo-sidecar-1"
_TENSORS = (
    "common.sigmas",
    "common.state_indices",
    "common.sde_indices",
    "conditions.prompt_embeds",
    "tracks.image.latents",
    "tracks.image.log_probs",
)


class SidecarError(RuntimeError):
    """A sidecar cannot be trusted: the file and what is wrong with it."""

    def __init__(self, path: str, why: str):
        super().__init__(path, why)  # pickle, and so Ray, rebuilds from these
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"trajectory sidecar {self.path}: {self.why}"


def candidate_manifests(trajectory: GroupTrajectory, weight_manifest_hash: str) -> list[dict[str, object]]:
    """One small JSON manifest per candidate: which policy and which sampling settings drew it (E7)."""
    request = trajectory.request
    return [
        {
            "sample_id": sample_id,
            "policy_version": trajectory.policy_version,
            "sampling_fingerprint": request.sampling.fingerprint(),
            "weight_manifest_hash": weight_manifest_hash,
        }
        for sample_id in request.sample_ids
    ]


def write_sidecar(path: Path, trajectory: GroupTrajectory, weight_manifest_hash: str = "") -> None:
    """Writes all of `trajectory` but its images. Raises SidecarError if it is not finite, OSError as the disk does."""
    if problem := _problem(trajectory):
        raise SidecarError(str(path), f"not written: {problem}")
    request = trajectory.request
    tensors = {
        "common.sigmas": trajectory.sigmas,
        "common.state_indices": torch.tensor(request.state_indices, dtype=torch.int64),
        "common.sde_indices": torch.tensor(request.sde_indices, dtype=torch.int64),
        "conditions.prompt_embeds": trajectory.prompt_embeds_LE,
        "tracks.image.latents": trajectory.latents_NUPC,
        "tracks.image.log_probs": trajectory.log_probs_NS,
    }
    header = {
        "format": FORMAT,
        "request": json.dumps(asdict(request), ensure_ascii=False),
        "height": str(trajectory.height),
        "width": str(trajectory.width),
        "policy_version": str(trajectory.policy_version),
        "candidates": json.dumps(candidate_manifests(trajectory, weight_manifest_hash)),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata=header))


def read_sidecar(path: Path) -> GroupTrajectory:
    """The trajectory of one group, checked. Raises SidecarError naming the file and the fault."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise SidecarError(str(path), f"cannot be read: {error}") from error
    if header.get("format") != FORMAT:
        raise SidecarError(str(path), f"format {header.get('format')!r}, expected {FORMAT!r}")
    if missing := [name for name in _TENSORS if name not in tensors]:
        raise SidecarError(str(path), f"lacks {', '.join(missing)}")
    trajectory = GroupTrajectory(
        request=_request(json.loads(header["request"])),
        height=int(header["height"]),
        width=int(header["width"]),
        sigmas=tensors["common.sigmas"],
        latents_NUPC=tensors["tracks.image.latents"],
        log_probs_NS=tensors["tracks.image.log_probs"],
        prompt_embeds_LE=tensors["conditions.prompt_embeds"],
        images_NHWC=None,
        policy_version=int(header["policy_version"]),
    )
    if problem := _problem(trajectory):
        raise SidecarError(str(path), problem)
    return trajectory


def _request(data: dict) -> GroupRequest:
    sampling = data.pop("sampling")
    tuples = ("sample_ids", "sigmas", "sde_indices")
    data.update({name: tuple(data[name]) for name in tuples})
    return GroupRequest(sampling=SamplingConfig.from_dict(sampling), **data)


def _problem(trajectory: GroupTrajectory) -> str | None:
    """What is wrong with the shapes or values, in words; None if nothing is."""
    request = trajectory.request
    N, U, S = len(request.sample_ids), len(request.state_indices), len(request.sde_indices)
    if not S:
        return "no SDE step was sampled, so nothing can be replayed: set sde_indices or num_sde_steps"
    wanted: Sequence[tuple[str, Tensor, tuple[int, ...]]] = (
        ("latents", trajectory.latents_NUPC, (N, U)),
        ("log_probs", trajectory.log_probs_NS, (N, S)),
        ("sigmas", trajectory.sigmas, (len(request.sigmas),)),
        ("prompt_embeds", trajectory.prompt_embeds_LE, ()),
    )
    for name, tensor, leading in wanted:
        if tuple(tensor.shape[: len(leading)]) != leading:
            return f"{name} has shape {tuple(tensor.shape)}, expected it to begin with {leading}"
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} holds a value that is not finite"
    return None
