"""A checkpoint on disk: written so that a kill at any moment leaves nothing that a resume would trust.

    <save>/<task>/iter_<n:07d>/
        fsdp/*.safetensors           DCP shards: trainable weights and AdamW state (the adapter alone under LoRA)
        checksums_rank<r>.json       CRC-32 of every MiB of the rank's shards
        rng_rank<r>.pt
        trainer_state.json           rollout id, policy version, lr steps, and the size of every file above
        weight_sync_manifest.json
        metrics.jsonl                the run's metrics so far
        adapter_contract.json        what a resume must match: mode, base-model hash, LoRA settings
        COMMITTED                    last; the only thing that a resume trusts. Holds the small files' SHA-256
    <save>/<task>/latest_checkpointed_iteration.txt, and the same one level up

Shards are safetensors rather than DCP's own format, whose index is a pickle: a checkpoint from a stranger cannot
run code here. Every function that takes an actor is collective: all ranks call it.
"""

import errno
import hashlib
import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from flowgrpo_rollout_sglang.files import write_atomic
from torch import Tensor

from flowgrpo_fsdp_actor.checkpoint_blocks import RESTORE
from flowgrpo_fsdp_actor.checkpoint_shards import StoredPiece, read_shards, stored_pieces, whole_shape, write_shards
from flowgrpo_fsdp_actor.distributed import fail_together
from flowgrpo_fsdp_actor.errors import CheckpointError

if TYPE_CHECKING:
    from flowgrpo_fsdp_actor.actor import FsdpActor

COMMITTED = "COMMITTED"
LATEST = "latest_checkpointed_iteration.txt"
HISTORY = "metrics.jsonl"
CHECKSUMS = "checksums_rank"
JSON_FILES = ("trainer_state.json", "weight_sync_manifest.json", "adapter_contract.json")
COUNTERS = ("rollout_id", "policy_version", "lr_scheduler_steps")
"""What trainer_state.json must say, for the run to go on where it was."""


@dataclass(frozen=True)
class CheckpointTree:
    """Where the checkpoints of one task lie."""

    save: Path
    task: str

    @property
    def folder(self) -> Path:
        return self.save / self.task

    def iteration(self, n: int) -> Path:
        return self.folder / f"iter_{n:07d}"

    def committed(self) -> list[int]:
        """Iterations that a resume may trust, oldest first."""
        numbers = (path.parent.name.removeprefix("iter_") for path in self.folder.glob(f"iter_*/{COMMITTED}"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def newest(self) -> int:
        """The iteration to resume from. Raises CheckpointError where there is none, or a newer one was lost."""
        if not self.folder.is_dir():
            raise CheckpointError(str(self.folder), "there is no such folder", "name the folder that --save had")
        committed = self.committed()
        if not committed:
            raise CheckpointError(
                str(self.folder),
                "holds no committed checkpoint",
                "name another folder; to start afresh, leave --load out",
            )
        latest = self.folder / LATEST
        said = latest.read_text().strip() if latest.is_file() else ""
        if said.isdigit() and int(said) > committed[-1]:
            raise CheckpointError(
                str(self.iteration(int(said))),
                f"{LATEST} names it, but it is gone or not committed",
                f"restore it, or write {committed[-1]} into {latest} to go on from there",
            )
        return committed[-1]


def save_checkpoint(
    actor: "FsdpActor", tree: CheckpointTree, n: int, documents: Mapping[str, Any], history: str = ""
) -> None:
    """Writes iteration `n`: shards, RNG, JSON, COMMITTED, latest, in this order (C1).

    Args:
        documents: file name -> JSON value, for each of JSON_FILES.
        history: the run's metrics so far, kept as metrics.jsonl.

    Raises:
        CheckpointError: on every rank, if any rank could not write; nothing was committed, and the checkpoint
            before it still is the latest.
    """
    folder, first = tree.iteration(n), dist.get_rank() == 0
    failed = _attempt(lambda: _fresh(folder) if first else None)
    _all_or_none(failed, folder)
    try:
        failed = _attempt(lambda: _write_shards(actor, folder))
        _all_or_none(failed, folder)  # the MIN all-reduce: every rank has written
        failed = _attempt(lambda: _commit(tree, n, documents, history) if first else None)
        _all_or_none(failed, folder)
    except CheckpointError:
        if first and not (folder / COMMITTED).is_file():
            shutil.rmtree(folder, ignore_errors=True)  # what it holds may be what filled the disk
        raise


def load_checkpoint(actor: "FsdpActor", tree: CheckpointTree, n: int) -> dict[str, Any]:
    """Reads iteration `n` into `actor`, on any number of ranks; returns its trainer_state.json.

    Raises CheckpointError naming the file and what is wrong with it, on every rank: before a weight has moved, unless
    it is a shard's content (its size and header may be right) or the disk fails while reading. Then throw `actor` away.
    """
    folder = tree.iteration(n)
    state: dict[str, Any] = {}
    random_states: dict[str, Any] = {}
    rng = folder / f"rng_rank{dist.get_rank()}.pt"

    def check() -> None:
        state.update(read_documents(folder)["trainer_state.json"])
        if rng.is_file():  # fewer ranks wrote than read now: the new ranks keep their own
            random_states.update(_read_rng(rng))

    _all_or_none(_attempt(check), folder)
    live = actor.checkpoint_state()
    stored: dict[str, list[StoredPiece]] = {}
    _all_or_none(_attempt(lambda: stored.update(_checked_tensors(folder, _flat(live)))), folder)
    _all_or_none(_attempt(lambda: read_shards(_flat(live), stored)), folder)
    actor.load_checkpoint_state(live)
    actor.lr_scheduler_steps = state["lr_scheduler_steps"]
    _all_or_none(_attempt(lambda: _restore_rng(actor, random_states, rng) if random_states else None), folder)
    return state


def read_documents(folder: Path) -> dict[str, Any]:
    """The JSON files of a committed checkpoint, every one of whose files is there, whole.

    Raises CheckpointError naming the file: missing, cut, changed after the commit, or not JSON.
    """
    if not (folder / COMMITTED).is_file():
        why = "was never finished: it holds no COMMITTED" if folder.is_dir() else "there is no such checkpoint"
        others = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"iter_*/{COMMITTED}")))
        raise CheckpointError(str(folder), why, f"take one that was committed; there: {others or 'none'}")
    try:
        digests: dict[str, str] = _read_json(folder / COMMITTED)["sha256"]
        for name in (*JSON_FILES, HISTORY, *digests):
            if hashlib.sha256(_read(_inside(folder, name))).hexdigest() != digests[name]:
                raise CheckpointError(str(folder / name), "was changed after it was saved", RESTORE)
        documents = {name: _read_json(folder / name) for name in JSON_FILES}
        state = documents["trainer_state.json"]
        for name, size in state["files"].items():
            if (found := _inside(folder, name).stat().st_size) != size:
                raise CheckpointError(str(folder / name), f"has {found} bytes, {size} were written", RESTORE)
        if unsaid := [name for name in COUNTERS if type(state.get(name)) is not int]:
            raise CheckpointError(str(folder / "trainer_state.json"), f"says no {', '.join(unsaid)}", RESTORE)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            str(folder), f"lacks what a checkpoint holds ({type(error).__name__}: {error})", RESTORE
        ) from error
    return documents


def stored_tensors(folder: Path) -> dict[str, list[StoredPiece]]:
    """Every tensor of a committed checkpoint, and where its pieces lie. Raises CheckpointError."""
    checksums: dict[str, list[int]] = {}
    for name in _read_json(folder / COMMITTED)["sha256"]:
        if name.startswith(CHECKSUMS):
            checksums.update(_read_json(_inside(folder, name)))
    return stored_pieces(folder / "fsdp", checksums)


def commit_record(folder: Path, n: int) -> str:
    """The content of COMMITTED: which iteration, and the SHA-256 of every file beside the shards."""
    small = sorted(path for path in folder.iterdir() if path.is_file() and path.name != COMMITTED)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in small}
    return json.dumps({"iteration": n, "sha256": digests}, indent=2) + "\n"


def rotate(tree: CheckpointTree, keep: int) -> list[int]:
    """Rank 0 removes the oldest checkpoints so that, with the next one, `keep` remain; returns what fell.

    The newest committed one always stays, also with keep = 1, until a newer one is committed. Uncommitted
    leftovers go too. The outcome is broadcast: a failure raises CheckpointError on every rank (C2).
    """
    removed: list[int] = []

    def remove() -> None:
        committed = tree.committed()
        fall = committed[: max(0, len(committed) - max(keep - 1, 1))]
        for n in fall:
            (tree.iteration(n) / COMMITTED).unlink()  # first: from now on nobody trusts it
            shutil.rmtree(tree.iteration(n))
            removed.append(n)
        for path in tree.folder.glob("iter_*"):
            if not (path / COMMITTED).is_file():
                shutil.rmtree(path)

    _all_or_none(_attempt(remove if dist.get_rank() == 0 else lambda: None), tree.folder)
    told: list[Any] = [removed]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _fresh(folder: Path) -> None:
    if (folder / COMMITTED).is_file():
        raise CheckpointError(str(folder), "already holds a committed checkpoint", "resume from it, or move it away")
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    (folder / "fsdp").mkdir(parents=True)


def _write_shards(actor: "FsdpActor", folder: Path) -> None:
    rank = dist.get_rank()
    checksums = json.dumps(write_shards(_flat(actor.checkpoint_state()), folder / "fsdp", rank))
    write_atomic(folder / f"{CHECKSUMS}{rank}.json", lambda temporary: temporary.write_text(checksums))
    state = actor.rng_state()
    write_atomic(folder / f"rng_rank{rank}.pt", lambda temporary: torch.save(state, temporary))


def _commit(tree: CheckpointTree, n: int, documents: Mapping[str, Any], history: str) -> None:
    folder = tree.iteration(n)
    write_atomic(folder / HISTORY, lambda temporary: temporary.write_text(history))
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    for name in JSON_FILES:
        value = documents[name] | ({"files": sizes} if name == "trainer_state.json" else {})
        text = json.dumps(value, indent=2, ensure_ascii=False)
        write_atomic(folder / name, lambda temporary, text=text: temporary.write_text(text))
    record = commit_record(folder, n)
    write_atomic(folder / COMMITTED, lambda temporary: temporary.write_text(record))
    for latest in (tree.folder / LATEST, tree.save / LATEST):
        write_atomic(latest, lambda temporary: temporary.write_text(f"{n}\n"))


def _inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`: whoever wrote the name, no other file is looked at."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(str(folder), f"names a file outside itself: {name!r}", "do not use it")
    if not path.is_file():  # nor a pipe or a device, which would be read for ever
        raise CheckpointError(str(path), "is missing", RESTORE)
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}", "see its permissions") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"is not JSON: {error}", RESTORE) from error


def _read_rng(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: anything else in it is refused, not run."""
    try:
        return torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise _no_random_state(path, error) from error


def _restore_rng(actor: "FsdpActor", state: dict[str, Any], path: Path) -> None:
    try:
        actor.load_rng_state(state)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise _no_random_state(path, error) from error


def _no_random_state(path: Path, error: Exception) -> CheckpointError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(str(path), f"holds no random state: {first}", RESTORE)


def _checked_tensors(folder: Path, live: Mapping[str, Tensor]) -> dict[str, list[StoredPiece]]:
    """Where each tensor lies. Raises CheckpointError naming those that are missing, unknown or of another shape."""
    stored = stored_tensors(folder)
    wrong = [name for name in live if name not in stored or whole_shape(stored[name]) != tuple(live[name].shape)]
    wrong += [name for name in stored if name not in live]
    if wrong:
        shown = ", ".join(wrong[:3]) + (f", ... ({len(wrong)} in all)" if len(wrong) > 3 else "")
        raise CheckpointError(
            str(folder), f"does not hold this model's tensors: {shown}", "check --model-path and the LoRA flags"
        )
    return stored


def _flat(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One level, as safetensors has it: "model/..." and "optimizer/...". The tensors are the live ones."""
    return {f"{part}/{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def _attempt(work: Any) -> Exception | None:
    try:
        work()
    except Exception as error:  # carried to every rank by _all_or_none
        return error
    return None


def _all_or_none(failed: Exception | None, folder: Path) -> None:
    """Raises on every rank if any rank failed: a MIN all-reduce of success, then the first failure's words."""
    succeeded = torch.tensor(0 if failed else 1)
    said: list[Any] = [None] * dist.get_world_size()
    with fail_together("a checkpoint"):  # a rank that failed in an earlier phase does not come
        dist.all_reduce(succeeded, op=dist.ReduceOp.MIN)
        if succeeded.item():
            return
        dist.all_gather_object(said, failed and _as_checkpoint_error(failed, dist.get_rank(), folder))
    raise next(error for error in said if error is not None) from failed


def _as_checkpoint_error(error: Exception, rank: int, folder: Path) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    if not isinstance(error, OSError):
        return CheckpointError(str(folder), f"rank {rank}: {type(error).__name__}: {error}", "report this")
    fix = "see the disk and the folder's permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "make room; --rotate-ckpt --max-actor-ckpt-to-keep N removes old checkpoints before each save"
    if error.errno == errno.ENOENT:  # rank 0 had made its folder
        fix = "on several nodes --save must be a folder that all of them share; on one, see what has removed it"
    return CheckpointError(str(error.filename or folder), f"rank {rank}: {error.strerror}", fix)
