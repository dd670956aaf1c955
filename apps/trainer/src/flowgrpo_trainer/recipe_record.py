"""What a run was made of, in one JSON file: `<artifact root>/recipes/<recipe>-<time>.json` (requirements, 13)."""

import json
from datetime import UTC, datetime
from pathlib import Path

from flowgrpo_rollout_sglang.files import write_atomic

from flowgrpo_trainer.cli import settings_as_json
from flowgrpo_trainer.provenance import git_revision, package_versions
from flowgrpo_trainer.settings import Settings


def write_recipe_record(settings: Settings, recipe: str, prompt_fingerprint: str) -> Path:
    """Writes the record of this start; returns its path."""
    assert settings.rollout.artifact_root is not None
    folder = settings.rollout.artifact_root / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(recipe).stem
    path = folder / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}.json"
    evaluation = settings.rollout.eval_prompt_data
    record = {
        "recipe": recipe,
        "prompt_set": str(settings.rollout.prompt_data),
        "prompt_set_sha256": prompt_fingerprint,
        "eval_set": str(evaluation[1]) if evaluation else None,
        "loader_order": f"shuffled in each epoch by seed {settings.rollout.rollout_seed}",
        "sampling_config": settings_as_json(settings)["rollout"]["sampling_config"],
        "advantage_std_mode": settings.std_mode,
        "lora_sync_mode": settings.weight_sync_mode if settings.lora.lora_rank else None,
        "git_revision": git_revision(),
        "sglang_patch": _patch_version(),
        "versions": package_versions(),
        "settings": settings_as_json(settings),
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    write_atomic(path, lambda temporary: temporary.write_text(text))
    return path


def _patch_version() -> str:
    """SGLang's version and the digest of the patch that this installation carries."""
    from flowgrpo_rollout_sglang.patch.insertions import load

    manifest, _ = load()
    return f"{manifest.sglang_version}-{manifest.digest}"
