"""From a committed checkpoint to files that others load: a merged transformer, or a PEFT adapter (C5).

Tensors are read, merged and written one at a time, so memory stays near the largest tensor. What is exported
is what was trained: an uncommitted checkpoint, a base of another hash, or a LoRA merge without a base is refused,
and `verify_*` prove the result by a forward pass.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flowgrpo_rollout_sglang.files import write_atomic
from safetensors import safe_open
from torch import Tensor

from flowgrpo_fsdp_actor.checkpoint_blocks import RESTORE
from flowgrpo_fsdp_actor.checkpoint_files import CheckpointTree, read_documents, stored_tensors
from flowgrpo_fsdp_actor.checkpoint_shards import StoredPiece, read_shards, whole_shape
from flowgrpo_fsdp_actor.contract import base_model_hash
from flowgrpo_fsdp_actor.errors import CheckpointError, ExportError
from flowgrpo_fsdp_actor.safetensors_header import DTYPE_NAMES, Layout, header_bytes

PREFIX = "model/"


@dataclass(frozen=True)
class Checkpoint:
    """A committed iteration, read tensor by tensor."""

    folder: Path

    @classmethod
    def open(cls, save: Path, task: str, iteration: int | None) -> "Checkpoint":
        """`iteration` None is the newest. Raises CheckpointError for one that is missing or uncommitted."""
        tree = CheckpointTree(save, task)
        checkpoint = cls(tree.iteration(tree.newest() if iteration is None else iteration))
        _ = checkpoint.documents
        return checkpoint

    @cached_property
    def documents(self) -> dict[str, Any]:
        return read_documents(self.folder)

    @property
    def contract(self) -> dict[str, Any]:
        return self.documents["adapter_contract.json"]

    @property
    def is_lora(self) -> bool:
        return self.contract["mode"] == "lora"

    @cached_property
    def _stored(self) -> dict[str, list[StoredPiece]]:
        """Trained weight -> its pieces."""
        stored = stored_tensors(self.folder)
        return {name.removeprefix(PREFIX): pieces for name, pieces in stored.items() if name.startswith(PREFIX)}

    def names(self) -> list[str]:
        return sorted(self._stored)

    def layout(self, prefix: str = "") -> Layout:
        """Every trained tensor, its name behind `prefix`."""
        stored = {name: self._stored[name] for name in self.names()}
        return {prefix + name: (DTYPE_NAMES[of[0].dtype], whole_shape(of)) for name, of in stored.items()}

    def read(self, name: str) -> Tensor:
        """The whole tensor, put together from every rank's piece. Raises CheckpointError."""
        pieces = self._stored[name]
        whole = torch.empty(whole_shape(pieces), dtype=pieces[0].dtype)
        try:
            read_shards({name: whole}, {name: pieces})
        except OSError as error:
            raise CheckpointError(str(pieces[0].file.path), f"cannot be read: {error.strerror}", RESTORE) from error
        return whole


def export_merged(checkpoint: Checkpoint, base: Path | None, output: Path, *, part: str = "transformer") -> None:
    """A folder `output`/`part` that diffusers loads: the trained transformer in the base's own files and dtypes.

    Under LoRA each target is W + alpha / rank * B A, computed in fp32 before the cast.

    Raises:
        ExportError: no base for a LoRA checkpoint; a base of another hash; weights that find no place in the base.
    """
    if base is None:
        raise ExportError(
            str(checkpoint.folder),
            "a merged export needs the base model"
            + (
                ": the checkpoint holds the adapter alone" if checkpoint.is_lora else ", for its config and file layout"
            ),
            "add --base-model-path",
        )
    _check_base(checkpoint, base, part)
    source, target = base / part, output / part
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".json":
            shutil.copyfile(path, target / path.name)
    trained = set(checkpoint.names())
    used: set[str] = set()
    merge = _lora_merger(checkpoint, used) if checkpoint.is_lora else _replacer(checkpoint, used)
    for path in sorted(source.glob("*.safetensors")):
        _rewrite(path, target / path.name, merge)
    if unused := sorted(trained - used):
        raise ExportError(
            str(checkpoint.folder),
            f"{len(unused)} trained tensors have no place in {source}: {unused[:3]}",
            "check the base",
        )


def export_adapter(checkpoint: Checkpoint, output: Path, base: str = "") -> None:
    """A PEFT adapter folder, with the same adapter beside it as diffusers' `load_lora_weights` reads it.

    Raises ExportError for a checkpoint of full fine-tuning, which has no adapter.
    """
    contract = checkpoint.contract
    if not checkpoint.is_lora:
        raise ExportError(str(checkpoint.folder), "full fine-tuning has no adapter", "use --form merged")
    output.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": contract["lora_rank"],
        "lora_alpha": contract["lora_alpha"],
        "lora_dropout": contract["lora_dropout"],
        "target_modules": contract["lora_target_modules"],
        "bias": "none",
        "inference_mode": True,
    }
    write_atomic(output / "adapter_config.json", lambda path: path.write_text(json.dumps(config, indent=2)))
    for file, prefix, metadata in (
        ("adapter_model.safetensors", "base_model.model.", {"format": "pt"}),
        (
            "pytorch_lora_weights.safetensors",
            "transformer.",
            {"format": "pt", "lora_adapter_metadata": json.dumps(_diffusers_metadata(config))},
        ),
    ):
        layout = checkpoint.layout(prefix)
        _write_safetensors(output / file, layout, metadata, lambda name, of=prefix: checkpoint.read(name[len(of) :]))


def _diffusers_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """What diffusers reads rank and alpha from; without it alpha would default to the rank, another policy."""
    names = ("r", "lora_alpha", "lora_dropout", "target_modules", "bias")
    plain = {"rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "lora_bias": False}
    return {f"transformer.{name}": value for name, value in ({n: config[n] for n in names} | plain).items()}


def _check_base(checkpoint: Checkpoint, base: Path, part: str) -> None:
    if not (base / part).is_dir():
        raise ExportError(str(base), f"has no {part} folder", "name the folder of the base model")
    revision = checkpoint.documents["trainer_state.json"].get("model_revision")
    found, saved = base_model_hash(base, revision, part), checkpoint.contract["base_model_hash"]
    if found != saved:
        raise ExportError(
            str(base),
            f"is not the model that was trained: hash {found[:12]}, the checkpoint says {saved[:12]}",
            "name the model that training had as --model-path",
        )


def _lora_merger(checkpoint: Checkpoint, used: set[str]) -> Callable[[str, Tensor], Tensor]:
    """name, base weight -> merged weight, in the base's dtype."""
    names = set(checkpoint.names())
    scale = checkpoint.contract["lora_alpha"] / checkpoint.contract["lora_rank"]

    def merge(name: str, weight: Tensor) -> Tensor:
        stem = name.removesuffix(".weight")
        a, b = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
        if not name.endswith(".weight") or a not in names or b not in names:
            return weight
        used.update((a, b))
        delta = checkpoint.read(b).float() @ checkpoint.read(a).float()
        _check_shape(checkpoint, name, delta, weight)
        return (weight.float() + scale * delta).to(weight.dtype)

    return merge


def _replacer(checkpoint: Checkpoint, used: set[str]) -> Callable[[str, Tensor], Tensor]:
    names = set(checkpoint.names())

    def replace(name: str, weight: Tensor) -> Tensor:
        if name not in names:
            raise ExportError(str(checkpoint.folder), f"does not hold {name}, which the base has", "check the base")
        used.add(name)
        trained = checkpoint.read(name)
        _check_shape(checkpoint, name, trained, weight)
        return trained.to(weight.dtype)

    return replace


def _check_shape(checkpoint: Checkpoint, name: str, trained: Tensor, base: Tensor) -> None:
    if trained.shape != base.shape:
        why = f"makes {name} of shape {tuple(trained.shape)}, the base has {tuple(base.shape)}"
        raise ExportError(str(checkpoint.folder), why, "check the base")


def _rewrite(source: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """`source` with every tensor passed through `change`; shapes and dtypes stay."""
    with safe_open(source, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        layout = {name: (of.get_dtype(), of.get_shape()) for name, of in slices.items()}
        _write_safetensors(target, layout, file.metadata(), lambda name: change(name, file.get_tensor(name)))


def _write_safetensors(
    path: Path, layout: Layout, metadata: dict[str, str] | None, tensor: Callable[[str], Tensor]
) -> None:
    """Asks for one tensor at a time. Raises OSError with the path in it."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as out:
            out.write(header_bytes(layout, metadata))
            for name in layout:
                out.write(tensor(name).contiguous().view(-1).view(torch.uint8).numpy().data)

    write_atomic(path, write)


def changed_tensors(exported: Path, base: Path, part: str = "transformer") -> Iterator[str]:
    """Names whose values differ between two transformer folders of the same files."""
    for path in sorted((base / part).glob("*.safetensors")):
        with safe_open(path, framework="pt") as old, safe_open(exported / part / path.name, framework="pt") as new:
            for name in old.keys():  # noqa: SIM118 (not a dict)
                if not torch.equal(old.get_tensor(name), new.get_tensor(name)):
                    yield name
