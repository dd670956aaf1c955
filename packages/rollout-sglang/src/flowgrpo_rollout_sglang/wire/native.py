"""The native CUDA copies of `csrc`: compiled at first use, kept in the user's cache, loaded once for each process.

Built against torch's stable ABI, so one build serves torch 2.11 and later. Without the CUDA toolkit the wire works
with plain tensor operations, which give the same bytes and the same fingerprints, slower.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parents[1] / "csrc"
SWITCH = "FLOWGRPO_WIRE_NATIVE"
"""Environment variable: 0 keeps to plain tensor operations."""

_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "--extended-lambda", "-lineinfo")
_ABI = ("-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000")  # 2.11


class NativeBuildError(RuntimeError):
    """The CUDA toolkit is there and could not build the extension."""

    def __init__(self, command: str, output: str):
        super().__init__(command, output)
        self.command, self.output = command, output

    def __str__(self) -> str:
        return f"{self.command}\n{self.output[-4000:]}\nhint: {SWITCH}=0 does without the extension, slower"


def find_nvcc() -> Path | None:
    """The CUDA compiler of CUDA_HOME, of the PATH or of /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home, "bin", "nvcc")] if home else []
    if found := shutil.which("nvcc"):
        places.append(Path(found))
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((place for place in places if place.is_file()), None)


def compile_library(nvcc: Path, arch: str, library: Path) -> None:
    """Compiles `csrc` for one GPU architecture, such as `90`, into `library`. Raises NativeBuildError."""
    library.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        command = [
            *(str(nvcc), *_FLAGS, *_ABI),
            *("-gencode", f"arch=compute_{arch},code=sm_{arch}", f"-I{root / 'include'}"),
            *(str(SOURCES / "wire_copy.cu"), f"-L{root / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", "-o", str(built)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NativeBuildError(" ".join(command), done.stdout + done.stderr)
        built.replace(library)  # in one step: ranks of one host may build at the same time


def _cached_library(nvcc: Path, arch: str) -> Path:
    """Where a build of these sources belongs."""
    state = hashlib.sha256(" ".join((*_FLAGS, *_ABI, arch, str(nvcc.resolve()))).encode())
    for source in sorted(SOURCES.glob("*")):
        state.update(source.read_bytes())
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_home / "flowgrpo" / "native" / f"wire_copy-sm{arch}-{state.hexdigest()[:16]}.so"


@cache
def load() -> Any | None:
    """The operators `gather` and `scatter`, built if need be; None where the GPU or the toolkit is missing.

    Raises NativeBuildError.
    """
    nvcc = find_nvcc()
    if os.environ.get(SWITCH) == "0" or nvcc is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    library = _cached_library(nvcc, f"{major}{minor}")
    if not library.is_file():
        compile_library(nvcc, f"{major}{minor}", library)
    torch.ops.load_library(str(library))
    return torch.ops.flowgrpo_wire
