"""Where a run's pictures and sidecars lie, and which of them are kept.

    <root>/<task>/rollout_<id:07d>/group_<idx:08d>.safetensors
    <root>/<task>/rollout_<id:07d>/group_<idx:08d>_sample_<slot:04d>.png
    <root>/eval/<task>/rollout_<id:07d>/...          the same, for evaluations
    <root>/<task>/.in-use                            which run writes here, and locked while it does

Called by: the driver alone. Every training rank reads the sidecars, so the root is storage that all hosts see.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from PIL import Image
from torch import Tensor

from flowgrpo_rollout_sglang.files import write_atomic
from flowgrpo_rollout_sglang.request import GroupTrajectory
from flowgrpo_rollout_sglang.sidecar import write_sidecar

log = logging.getLogger(__name__)
IN_USE = ".in-use"


class FolderInUse(RuntimeError):  # noqa: N818  (the name says what happened)
    """Another run writes to a folder and removes what it does not know there: two runs would mix their files."""

    def __init__(self, setting: str, folder: str, holder: str):
        super().__init__(setting, folder, holder)  # pickle, and so Ray, rebuilds from these
        self.setting, self.folder, self.holder = setting, folder, holder

    def __str__(self) -> str:
        return (
            f"{self.setting}: {self.folder} is in use by {self.holder}\n"
            f"fix: wait until that run ends, or stop it, or give this one another {self.setting}"
        )


@contextmanager
def owned(folder: Path, *, setting: str, run_dir: Path | str) -> Iterator[None]:
    """Makes `folder` this run's alone until the block, or this process, ends.

    The lock is flock's on `<folder>/.in-use`: the kernel drops it with the process that took it, so a dead run never
    blocks. On NFS it holds between hosts too, unless the mount keeps locks local; for that case, and for messages,
    the file says who holds it, and who did when that run was killed. A file system without locks is warned about.

    Raises FolderInUse naming host, process and run folder of the holder; OSError as the disk does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / IN_USE, "a+") as file:
        _lock(file, setting, folder)
        _warn_of_another_host(_holder(file), folder)
        _say_holder(file, {"host": socket.gethostname(), "pid": os.getpid(), "run_dir": str(run_dir)})
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # what the file says counts while it is locked
                file.truncate(0)


def _lock(file: IO[str], setting: str, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderInUse(setting, str(folder), _in_words(_holder(file))) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        log.warning(
            "%s: this file system has no locks (%s); see to it that no other run uses the folder",
            folder,
            error.strerror,
        )


def _holder(file: IO[str]) -> dict[str, object]:
    """Who the lock file says took it last; {} after a clean end, and in the moment before it is said."""
    file.seek(0)
    try:
        said = json.loads(file.read())
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _say_holder(file: IO[str], holder: dict[str, object]) -> None:
    file.truncate(0)
    file.write(json.dumps(holder) + "\n")  # opened to append: at the end, wherever it was read
    file.flush()


def _in_words(holder: dict[str, object]) -> str:
    if not holder:
        return "another run"
    return f"process {holder.get('pid')} on host {holder.get('host')} (run folder {holder.get('run_dir')})"


def _warn_of_another_host(holder: dict[str, object], folder: Path) -> None:
    if holder and holder.get("host") != socket.gethostname():
        log.warning(
            "%s was last used by %s, which did not end in order; if it still runs, stop one of the two "
            "(this mount may not carry locks between hosts)",
            folder,
            _in_words(holder),
        )


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

    @property
    def folder(self) -> Path:
        """Of the training rollouts; its owner owns the evaluations too."""
        return self.root / self.task

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

        The latter are what a killed run left behind: they belong to weights that no longer exist. Of a run that
        lives they would be in use: only the folder's owner may ask (`owned`).
        """
        removed = []
        for folder in sorted(self.folder.glob("rollout_[0-9]*")):
            number = int(folder.name.removeprefix("rollout_"))
            stale = 0 < self.retention_rollouts <= rollout_id - number
            if stale or number >= rollout_id:
                shutil.rmtree(folder)
                removed.append(folder)
        return removed


def _write_png(path: Path, image_HWC: Tensor) -> None:
    picture = Image.fromarray(image_HWC.cpu().numpy())
    write_atomic(path, lambda temporary: picture.save(temporary, format="PNG"))
