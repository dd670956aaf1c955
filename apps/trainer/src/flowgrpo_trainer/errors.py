"""How an error of a worker is said to a person."""

import re

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
