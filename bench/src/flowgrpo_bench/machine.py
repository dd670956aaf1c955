"""On what a result was measured: it only means something beside the machine, the versions and the commit."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def machine_kind(device: str) -> str:
    """The name of the folder of baselines that this machine's results belong to: `h200`, `cpu-2-core`."""
    if device == "cuda":
        name = torch.cuda.get_device_name(0).lower().replace("nvidia", "")
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return f"cpu-{os.cpu_count()}-core"


def describe(device: str) -> dict[str, str]:
    """Machine, versions and commit, as strings."""
    facts = {
        "kind": machine_kind(device),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        drivers = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")  # a line for each GPU
        facts["driver"] = drivers.partition("\n")[0]
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _commit() -> str:
    if stated := os.environ.get("BENCH_COMMIT"):  # a copy of the tree without its history
        return stated
    commit = _run("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD")
    changed = _run("git", "-C", str(Path(__file__).parent), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed not in ("", "unknown") else commit


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
