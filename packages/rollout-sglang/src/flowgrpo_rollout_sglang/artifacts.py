"""Where a run's pictures and sidecars lie, and which of them are kept.

    <root>/<task>/rollout_<id:07d>/group_<idx:08d>.safetensors
    <root>/<task>/rollout_<id:07d>/group_<idx:08d>_sample_<slot:04d>.png
    <root>/eval/<task>/rollout_<id:07d>/...          the same, for evaluations

Called by: the driver alone. Every training rank reads the sidecars, so the root is storage that all hosts see.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from flowgrpo_rollout_sglang.files import write_atomic
from flowgrpo_rollout_sglang.request import GroupTrajectory
from flowgrpo_rollout_sglang.sidecar import write_sidecar


@dataclass(frozen=True)
class GroupFiles:
    """The files of one group: its sidecar and one PNG a candidate."""

    sidecar: Path
    images: tuple[Path, ...]


@dataclass(frozen=True)
class ArtifactStore:
    """The artifact tree of one task."""

    root: Path
    task: str = "t2i"
    retention_rollouts: int = 2
    """Rollout folders kept; 0 or less keeps all."""

    def rollout_folder(self, rollout_id: int, *, evaluation: bool = False) -> Path:
        base = self.root / "eval" if evaluation else self.root
        return base / self.task / f"rollout_{rollout_id:07d}"

    def sidecar_path(self, rollout_id: int, group_index: int) -> Path:
        """Where the sidecar of a training group lies: rows carry two numbers, not a path."""
        return self.rollout_folder(rollout_id) / f"group_{group_index:08d}.safetensors"

    def write_groups(
        self,
        rollout_id: int,
        trajectories: list[GroupTrajectory],
        *,
        evaluation: bool = False,
        weight_manifest_hash: str = "",
    ) -> list[GroupFiles]:
        """Writes sidecars (training only) and pictures; returns their paths, group by group.

        Raises SidecarError for a trajectory that is not finite, OSError as the disk does.
        """
        folder = self.rollout_folder(rollout_id, evaluation=evaluation)
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        pictures: list[tuple[Path, Tensor]] = []
        for trajectory in trajectories:
            stem = f"group_{trajectory.request.group_index:08d}"
            images = trajectory.images_NHWC
            if images is None:
                raise ValueError(f"{stem} has no images: only what an engine returned can be written")
            paths = tuple(folder / f"{stem}_sample_{slot:04d}.png" for slot in range(len(images)))
            pictures += zip(paths, images, strict=True)
            if not evaluation:
                write_sidecar(folder / f"{stem}.safetensors", trajectory, weight_manifest_hash)
            files.append(GroupFiles(folder / f"{stem}.safetensors", paths))
        with ThreadPoolExecutor(8) as pool:  # the wait is fsync's
            list(pool.map(lambda item: _write_png(*item), pictures))
        return files

    def prune_stale(self, rollout_id: int) -> list[Path]:
        """Removes training rollouts older than the retention, and any from `rollout_id` on.

        The latter are what a killed run left behind: they belong to weights that no longer exist.
        """
        removed = []
        for folder in sorted((self.root / self.task).glob("rollout_[0-9]*")):
            number = int(folder.name.removeprefix("rollout_"))
            stale = 0 < self.retention_rollouts <= rollout_id - number
            if stale or number >= rollout_id:
                shutil.rmtree(folder)
                removed.append(folder)
        return removed


def _write_png(path: Path, image_HWC: Tensor) -> None:
    picture = Image.fromarray(image_HWC.cpu().numpy())
    write_atomic(path, lambda temporary: picture.save(temporary, format="PNG"))
