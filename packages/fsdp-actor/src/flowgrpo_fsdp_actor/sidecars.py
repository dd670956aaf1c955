"""A rollout's sidecars, read ahead in threads while the GPU scores, sleeps and wakes.

Called by: `actor`. Next on the reading path: `replay`.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from flowgrpo_rollout_sglang.request import GroupTrajectory
from flowgrpo_rollout_sglang.sidecar import read_sidecar

READERS = 4


class SidecarReader:
    """Holds at most one rollout that nobody has taken yet."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="sidecars")
        self._ahead: dict[Path, Future[GroupTrajectory]] = {}

    def read_ahead(self, sidecars: Sequence[Path | str]) -> None:
        """Starts reading and returns at once; what is wrong with a file is raised by `read`. Forgets earlier ones."""
        for unread in self._ahead.values():
            unread.cancel()
        self._ahead = {path: self._threads.submit(read_sidecar, path) for path in map(Path, sidecars)}

    def read(self, sidecars: Sequence[Path | str | GroupTrajectory]) -> list[GroupTrajectory]:
        """The trajectories, in this order; files that were not read ahead are read now. Raises SidecarError."""
        ahead, self._ahead = self._ahead, {}
        reading = [
            source if isinstance(source, GroupTrajectory) else self._reading(source, ahead) for source in sidecars
        ]
        return [found if isinstance(found, GroupTrajectory) else found.result() for found in reading]

    def _reading(self, source: Path | str, ahead: dict[Path, Future[GroupTrajectory]]) -> Future[GroupTrajectory]:
        path = Path(source)
        return ahead.get(path) or self._threads.submit(read_sidecar, path)
