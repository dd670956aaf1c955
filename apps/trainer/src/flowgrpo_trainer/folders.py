"""What a run asks of the folders that it writes: that they are its own, and that every node sees them.

Called by: `session`; `owned_folders` before a worker starts, `assert_shared` as soon as all have.
"""

import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from flowgrpo_rollout_sglang.artifacts import ArtifactStore, owned
from flowgrpo_rollout_sglang.files import write_atomic

from flowgrpo_trainer.checkpoints import save_tree
from flowgrpo_trainer.errors import FolderNotShared
from flowgrpo_trainer.settings import Settings


def written_folders(settings: Settings, store: ArtifactStore) -> dict[str, Path]:
    """Flag -> folder that the driver and the ranks both use."""
    folders = {"--artifact-root": store.folder}
    if (tree := save_tree(settings)) is not None:
        folders["--save"] = tree.folder
    return folders


@contextmanager
def owned_folders(settings: Settings, store: ArtifactStore) -> Iterator[None]:
    """Nobody else's while the block runs. Raises FolderInUse, naming the run that has one of them now."""
    with ExitStack() as held:
        for flag, folder in written_folders(settings, store).items():
            held.enter_context(owned(folder, setting=flag, run_dir=settings.run.run_dir or ""))
        yield


Reader = Callable[[list[Path]], list[tuple[str, list[str]]]]
"""What each rank finds in some files, after the address of its node."""


def read_by(actors: Sequence[Any]) -> Reader:
    """Every rank's `ActorWorker.reads`."""
    return lambda paths: ray.get([actor.reads.remote(paths) for actor in actors])


def assert_shared(folders: Mapping[str, Path], read: Reader) -> None:
    """Every rank reads what the driver writes: the sidecars of a rollout, the folder of a checkpoint.

    Raises FolderNotShared naming flag, folder and the nodes of the ranks that do not; OSError as the disk does.
    """
    token = uuid.uuid4().hex  # in the name too, so that no node has it cached as missing
    files = {flag: folder / f".shared-{token}" for flag, folder in folders.items()}
    try:
        for path in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, lambda temporary: temporary.write_text(token))
        answers = read(list(files.values()))
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)
    for index, (flag, folder) in enumerate(folders.items()):
        blind = {rank: node for rank, (node, found) in enumerate(answers) if found[index] != token}
        if blind:
            raise FolderNotShared(flag, str(folder), socket.gethostname(), blind)
