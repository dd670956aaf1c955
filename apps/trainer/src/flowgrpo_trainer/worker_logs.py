"""What the workers log, on its way to the run's output: Ray would pass on all that their processes print, or nothing.

A worker keeps the lines that our packages log; after each rollout the driver fetches them and logs them again, each
line once however many ranks say it.
"""

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import ray

log = logging.getLogger(__name__)
PACKAGES = ("flowgrpo_math", "flowgrpo_rollout_sglang", "flowgrpo_fsdp_actor", "flowgrpo_rewards", "flowgrpo_trainer")
KEPT = 1000
"""Lines of a worker, at most: the oldest go first."""
FETCH_TIMEOUT_S = 5.0
Line = tuple[int, str]
"""Level and text."""


class LineKeeper(logging.Handler):
    """Keeps lines until they are fetched."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[Line] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, self.format(record)))

    def fetch(self) -> list[Line]:
        """The lines since the last time."""
        return [self._lines.popleft() for _ in range(len(self._lines))]


class LogsToDriver:
    """Of a worker that is alone in its process: keeps what our packages log there."""

    def __init__(self) -> None:
        self._kept = LineKeeper()
        for package in PACKAGES:
            logger = logging.getLogger(package)
            logger.setLevel(logging.INFO)
            logger.addHandler(self._kept)

    def logged(self) -> list[Line]:
        """Level and text of each line since the last call."""
        return self._kept.fetch()


def relay(workers: Mapping[str, Any]) -> None:
    """Logs the lines of all `workers`, by name, as if they had been said here.

    A line that several say is shown once; one that the first does not say has its worker's name before it. Workers that
    are dead, or busy for FETCH_TIMEOUT_S, are left out: their own errors are told elsewhere.
    """
    calls = {worker.logged.remote(): name for name, worker in workers.items()}
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=FETCH_TIMEOUT_S)
    first, shown = next(iter(workers)), set()
    for call in sorted(ready, key=list(calls).index):
        try:
            lines = ray.get(call)
        except ray.exceptions.RayError:
            continue
        fresh = [line for line in lines if line not in shown]
        shown |= set(fresh)
        for level, text in fresh:
            log.log(level, "%s", text if calls[call] == first else f"{calls[call]}: {text}")
