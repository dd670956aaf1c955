"""What a run was made with: package versions, git revision, machine. Nothing here imports torch."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OURS = ("math", "rollout-sglang", "fsdp-actor", "rewards", "dataprep", "trainer")
THEIRS = ("torch", "diffusers", "transformers", "peft", "ray", "TransferQueue", "sglang", "triton", "numpy")


def package_versions() -> dict[str, str]:
    """Versions of Python, of our packages and of those whose version can move a number; what is missing is left out."""
    versions = {"python": platform.python_version()}
    for name in (*(f"flowgrpo-{ours}" for ours in OURS), *THEIRS):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def git_revision() -> dict[str, str | bool] | None:
    """{"revision", "modified"} of the checkout that this file is tracked in; None where it is in none.

    An installed copy can lie in a virtual environment inside somebody's repository: that revision says nothing.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    revision = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    if revision is None or changes is None:
        return None
    return {"revision": revision, "modified": bool(changes)}


def machine() -> dict[str, str | int]:
    """System and the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"system": platform.platform(), "cpu_cores": cores}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a file system that hangs: the run goes on
        return None
    return done.stdout.strip() if done.returncode == 0 else None
