"""What a checkpoint and the run that resumes it must share: training mode, base model, LoRA settings (C3).

LoRA checkpoints hold the adapter alone and load the base afresh, and alpha cannot be read off any weight: a
resume with another base or another alpha would silently be another policy.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowgrpo_fsdp_actor.config import ActorConfig
from flowgrpo_fsdp_actor.errors import NotResumable

WHOLE_BELOW = 64 * 2**20
"""Files up to this many bytes are hashed whole."""
SAMPLES, SAMPLE_BYTES = 256, 64 * 2**10
"""Of larger files: head, tail and evenly spaced blocks, 16 MiB in all, so that 40 GB take a second, not a minute."""


def adapter_contract(config: ActorConfig, targets: tuple[str, ...], base_model_hash: str) -> dict[str, Any]:
    """The content of adapter_contract.json."""
    return {
        "mode": config.fsdp_trainable_mode,
        "task": config.generation_task,
        "base_model_hash": base_model_hash,
        "lora_rank": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "lora_target_modules": sorted(config.lora_target_modules or targets) if config.is_lora else [],
    }


def assert_resumable(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raises NotResumable with every setting that differs: what was saved, what is asked for."""
    differing = {key: (saved.get(key), now.get(key)) for key in now if saved.get(key) != now.get(key)}
    if differing:
        raise NotResumable(where, differing)


def base_model_hash(model_folder: Path, revision: str | None, part: str = "transformer") -> str:
    """SHA-256 over revision, config and weight files of the trained part.

    Weight files above 64 MiB are sampled (size, head, tail, 256 blocks): another model, dtype or fine-tuning is
    seen; a change confined to bytes between the blocks is not.
    """
    digest = hashlib.sha256(json.dumps(revision).encode())
    for path in sorted((model_folder / part).iterdir()):
        if path.suffix not in (".json", ".safetensors"):
            continue
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= WHOLE_BELOW:
                while block := file.read(2**20):
                    digest.update(block)
                continue
            for k in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * k // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
