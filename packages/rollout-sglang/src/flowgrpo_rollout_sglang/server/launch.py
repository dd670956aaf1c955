"""The server's main module: SGLang's own command line, with two watches that leave no process behind.

    python -m flowgrpo_rollout_sglang.server.launch serve ...

On a GPU SGLang starts its scheduler by `spawn`, which imports this file again under another name: keep it light.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import wait

PARENT_VARIABLE = "FLOWGRPO_PARENT_FD"
FOLDER_VARIABLE = "FLOWGRPO_FOLDER"
_LOOK_EVERY_S = 0.25
_REAP_WITHIN_S = 5.0


def last_words(pid: int) -> str:
    """How the line begins in which server `pid` says why it ends itself: the engine looks for it in the log."""
    return f"flowgrpo: ending server {pid}: "


def _end_group(why: str) -> None:
    """Ends this server and everything it started: they share a process group."""
    print(f"{last_words(os.getpid())}{why}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():  # one by one first, so that none is left unreaped
        child.kill()
        child.join(_REAP_WITHIN_S)
    if folder := os.environ.get(FOLDER_VARIABLE):  # the engine removes it too, if it lives
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _watch_parent(descriptor: int) -> None:
    """The other end of the pipe lies in the engine's process: the read returns when that one is gone.

    A pipe, not a death signal: that would come when the thread that started us ends, which may be a worker's thread.
    """
    os.read(descriptor, 1)
    _end_group("the engine stopped or its process is gone")


def _watch_scheduler() -> None:
    """Without its scheduler the HTTP side would keep every request waiting for ever. Each device has one; the
    others cannot go on without it."""
    children: set[multiprocessing.process.BaseProcess] = set()
    while not (ended := wait([child.sentinel for child in children], timeout=_LOOK_EVERY_S)):
        children |= set(multiprocessing.active_children())
    ends = sorted(f"{child.name} {_how_it_ended(child)}" for child in children if child.sentinel in ended)
    _end_group(f"the scheduler process ended: {', '.join(ends)}")


def _how_it_ended(child: multiprocessing.process.BaseProcess) -> str:
    child.join(_REAP_WITHIN_S)
    if child.exitcode is None:
        return "in an unknown way"
    return how_ended(child.exitcode)


def how_ended(code: int) -> str:
    """An exit code in words: a signal by its name, for a process that one kills has no last words itself."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = " (by hand, or the system was out of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {names.get(-code, f'signal {-code}')}{hint}"


def main() -> None:
    """Runs SGLang's command line with the arguments of this process."""
    if descriptor := os.environ.get(PARENT_VARIABLE):
        threading.Thread(target=_watch_parent, args=(int(descriptor),), daemon=True).start()
    threading.Thread(target=_watch_scheduler, daemon=True).start()
    if os.environ.get("SGLANG_DIFFUSION_PLATFORM_OVERRIDE") == "cpu":
        # SGLang spawns its scheduler because a fork would break CUDA. Without CUDA a fork is sound, and it saves the
        # second import of everything: half of the time to start.
        import sglang.multimodal_gen  # noqa: F401  (sets "spawn")

        multiprocessing.set_start_method("fork", force=True)
    from sglang.cli.main import main as sglang_main

    sglang_main()


if __name__ == "__main__":
    main()
