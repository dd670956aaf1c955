"""`trainer export`: a committed checkpoint as files that diffusers, peft and SGLang load.

Called by: `main`. The work is `flowgrpo_fsdp_actor.export`'s; here are the flags, and the proof by a forward pass.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

TOLERANCE = 1e-4
"""Largest relative difference between the merged model and base + adapter, in fp32; 2e-6 was measured."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What to export, and where to."""

    form: Literal["merged", "adapter"]
    """`merged` folds the adapter into the base; `adapter` writes a PEFT folder."""
    save_dir: Path
    """The run's --save folder."""
    output_dir: Path
    """Folder to write; must not exist yet or be empty."""
    task: str = "t2i"
    """Generation task, the subfolder of --save-dir."""
    iteration: int | None = None
    """Iteration of the checkpoint; none takes the newest committed."""
    model_adapter_path: str = "flowgrpo_fsdp_actor.adapters.qwen_image.QwenImageAdapter"
    """Dotted path of the model's adapter."""
    base_model_path: Path | None = None
    """The base model; needed for `merged`, and to verify an adapter."""
    verify: bool = False
    """Prove the export by a forward pass of what was written."""


def export(words: Sequence[str]) -> int:
    """Exports, and verifies if asked. Raises ExportError and CheckpointError in words."""
    settings = tyro.cli(ExportSettings, args=list(words), prog="trainer export", description=export.__doc__)
    from flowgrpo_fsdp_actor.errors import ExportError
    from flowgrpo_fsdp_actor.export import Checkpoint, export_adapter, export_merged

    output = settings.output_dir
    if output.exists() and any(output.iterdir()):
        raise ExportError(str(output), "the output folder is not empty", "name a new folder")
    checkpoint = Checkpoint.open(settings.save_dir, settings.task, settings.iteration)
    if settings.verify and settings.base_model_path is None:
        raise ExportError(str(checkpoint.folder), "--verify compares with the base model", "add --base-model-path")
    try:
        if settings.form == "merged":
            export_merged(checkpoint, settings.base_model_path, output)
        else:
            export_adapter(checkpoint, output, base=str(settings.base_model_path or ""))
    except BaseException as error:
        shutil.rmtree(output, ignore_errors=True)  # half an export looks like a whole one
        if isinstance(error, OSError):
            why = f"cannot be written: {error.strerror} ({error.filename})"
            raise ExportError(str(output), why, "make room, or name another folder") from error
        raise
    print(f"exported {checkpoint.folder} to {output}")
    if settings.verify:
        assert settings.base_model_path is not None
        print(_verify(settings, checkpoint))
    return 0


def _verify(settings: ExportSettings, checkpoint: object) -> str:
    """What a forward pass shows: the export computes what was trained, and not what the base computes."""
    from flowgrpo_fsdp_actor.adapters.verify_qwen_image import export_differences
    from flowgrpo_fsdp_actor.errors import ExportError

    assert settings.base_model_path is not None
    from_trained, from_base = export_differences(
        settings.form, checkpoint, settings.base_model_path, settings.output_dir
    )
    if not from_trained <= TOLERANCE:
        raise ExportError(
            str(settings.output_dir), f"computes {from_trained:.1e} away from base + checkpoint", "do not use it"
        )
    if from_base == 0.0:
        raise ExportError(str(settings.output_dir), "computes exactly what the base computes", "was anything trained?")
    return f"verified by a forward pass: {from_trained:.1e} from base + checkpoint, {from_base:.1e} from the base alone"
