"""How an error of a worker is said to a person."""

import re
from collections.abc import Mapping

WORKERS = {
    "ActorWorker": "a training rank",
    "RolloutWorker": "the worker of a rollout engine",
    "RewardWorker": "the worker of the scorer",
}
DEAD_WORKER = re.compile(r"class_name: (\w+).*?pid: (\d+)", re.DOTALL)
"""In Ray's own words, which also list every cause that it can think of."""


def in_words(error: BaseException) -> str:
    """A worker's own error, without Ray's remote traceback around it; of a worker that died, which one."""
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, Exception) else error
    name = type(shown).__name__
    text = str(shown)
    if name == "ActorDiedError" and (dead := DEAD_WORKER.search(text)):
        worker, process = dead.groups()
        return (
            f"{name}: {WORKERS.get(worker, worker)} (process {process}) died: it was killed, or it crashed\n"
            "hint: the kernel kills a process when memory is short (`dmesg`); a run with --save goes on with --load"
        )
    return text if text.startswith(name) else f"{name}: {text}"


class FolderNotShared(RuntimeError):  # noqa: N818  (the name says what happened)
    """Some ranks do not see what the driver writes to a folder that all of them need."""

    def __init__(self, flag: str, folder: str, driver: str, nodes: Mapping[int, str]):
        super().__init__(flag, folder, driver, dict(nodes))  # pickle, and so Ray, rebuilds from these
        self.flag, self.folder, self.driver, self.nodes = flag, folder, driver, dict(nodes)
        """`nodes`: rank -> address of its node."""

    def __str__(self) -> str:
        count = len(self.nodes)
        return (
            f"{self.flag}: what the driver ({self.driver}) writes to {self.folder} is not seen by {count} "
            f"rank{'s' * (count > 1)}, on {', '.join(sorted(set(self.nodes.values())))}\n"
            f"fix: give {self.flag} a folder that all nodes share, mounted at the same path on each"
        )
