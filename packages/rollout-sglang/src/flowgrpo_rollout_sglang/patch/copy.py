"""The copy of SGLang that carries our patch: a folder keyed by version and patch, made on first use.

The environment stays as it was installed. uv hard-links its files from a cache that every other environment
shares, so that one edited in place would change them all: the copy is never linked, and the in-place form
writes a new file and renames it over the old one.

Called by: `sglang_engine`, before each start of a server; `command`, for people. Imports no sglang.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from flowgrpo_rollout_sglang.files import write_atomic
from flowgrpo_rollout_sglang.patch import insertions
from flowgrpo_rollout_sglang.patch.insertions import Manifest, PatchError

CACHE_VARIABLE = "FLOWGRPO_CACHE"
APPLY = "rollout-sglang patch apply"


def cache_root() -> Path:
    """Where patched copies live: $FLOWGRPO_CACHE, else $XDG_CACHE_HOME/flowgrpo, else ~/.cache/flowgrpo."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowgrpo"


def copy_folder(manifest: Manifest) -> Path:
    """What goes first on the server's PYTHONPATH: the parent of the patched `sglang`."""
    return cache_root() / "sglang" / f"{manifest.sglang_version}-{manifest.digest}"


def installed_root(manifest: Manifest) -> Path:
    """Folder of the installed `sglang`. Raises PatchError for none, or for a version we have no patch for."""
    remedy = f"install sglang=={manifest.sglang_version} (the extra `sglang` of flowgrpo-rollout-sglang)"
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise PatchError("sglang", "it is not installed", remedy) from None
    if version != manifest.sglang_version:
        raise PatchError(f"sglang {version}", f"this patch is for {manifest.sglang_version} alone", remedy)
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError(f"sglang {version}", "its package folder cannot be found", remedy)
    return Path(next(iter(spec.submodule_search_locations)))


def check(manifest: Manifest | None = None) -> Path:
    """The copy, if each file that the patch touches is exactly as patched. Imports nothing of SGLang.

    Raises PatchError that names the version or the first wrong file with both hashes, and the remedy.
    """
    manifest = manifest or insertions.load()[0]
    installed_root(manifest)
    folder = copy_folder(manifest)
    if not (folder / "sglang").is_dir():
        raise PatchError(str(folder), "there is no patched copy of SGLang", f"run `{APPLY}`")
    _compare(folder / "sglang", manifest.patched, f"run `{APPLY}`")
    return folder


def ensure() -> Path:
    """The checked copy; makes it where there is none yet. Raises PatchError as `check` does."""
    manifest, _ = insertions.load()
    return check(manifest) if (copy_folder(manifest) / "sglang").is_dir() else apply()


def apply() -> Path:
    """Makes the copy anew if it is absent or not as patched; else leaves it. Safe against a second process.

    The copy is built beside its place and renamed into it: killed at any moment, it is whole or absent.
    """
    manifest, diff = insertions.load()
    source = installed_root(manifest)
    if insertions.digests(source, manifest.patched) != dict(manifest.patched):  # patched in place copies as well
        _compare(source, manifest.stock, "reinstall sglang: the patch fits the files of its release alone")
    folder = copy_folder(manifest)
    try:
        return check(manifest)
    except PatchError:
        pass  # absent or damaged: build it
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as building:
        # copy2 keeps modification times, so that the compiled files beside the sources stay valid
        shutil.copytree(source, Path(building) / "sglang", symlinks=False)
        _rewrite(Path(building) / "sglang", manifest, diff)
        old = Path(building) / "old"
        if folder.exists():
            folder.rename(old)
        try:
            Path(building, "sglang").rename(_made(folder) / "sglang")
        except OSError:
            if not (folder / "sglang").is_dir():  # else another process was first, with the same bytes
                raise
    return check(manifest)


def revert() -> bool:
    """Removes the copy. True if there was one."""
    folder = copy_folder(insertions.load()[0])
    if not folder.exists():
        return False
    shutil.rmtree(folder)
    return True


def apply_in_place() -> Path:
    """Patches the installed package itself, file by file through a rename. Idempotent."""
    manifest, diff = insertions.load()
    root = installed_root(manifest)
    if insertions.digests(root, manifest.patched) != dict(manifest.patched):
        _compare(root, manifest.stock, "reinstall sglang")
        _rewrite(root, manifest, diff)
    return root


def revert_in_place() -> Path:
    """Takes our lines out of the installed package. Idempotent."""
    manifest, diff = insertions.load()
    root = installed_root(manifest)
    if insertions.digests(root, manifest.stock) != dict(manifest.stock):
        _compare(root, manifest.patched, "reinstall sglang")
        _rewrite(root, manifest, diff, taking_out=True)
    return root


def _compare(root: Path, wanted: Mapping[str, str], remedy: str) -> None:
    found = insertions.digests(root, wanted)
    for name, digest in wanted.items():
        if found[name] != digest:
            why = f"SHA-256 is {found[name][:16]}, expected {digest[:16]}"
            raise PatchError(str(root / PurePosixPath(name)), why, remedy)


def _rewrite(root: Path, manifest: Manifest, diff: str, taking_out: bool = False) -> None:
    """Brings each touched file of `root` to its patched (or stock) text by replacing the file."""
    target = manifest.stock if taking_out else manifest.patched
    change = insertions.remove if taking_out else insertions.insert
    for name, pieces in insertions.parse(diff).items():
        path = root / PurePosixPath(name)
        data = path.read_bytes()
        if insertions.sha256(data) == target[name]:
            continue
        new = change(data.decode(), pieces).encode()
        if insertions.sha256(new) != target[name]:
            raise PatchError(str(path), "the shipped diff does not give the shipped hash", "reinstall this package")
        write_atomic(path, lambda temporary, new=new: _write(temporary, new))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
