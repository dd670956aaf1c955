"""A scorer's local folder: checked before a model is built, so that a missing file has a name.

No scorer downloads anything: a folder is complete or it is refused.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

from flowgrpo_rewards.protocol import ScorerLoadError

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
CLIP_FOLDER: dict[str, tuple[str, ...]] = {
    "configuration": ("config.json",),
    "weights": WEIGHTS,
    "tokenizer": ("tokenizer.json", "vocab.json"),
}
"""What a transformers CLIP folder holds; of each row, one file."""


def checked_folder(scorer: str, model_path: str | None, needs: Mapping[str, tuple[str, ...]], hint: str) -> Path:
    """The folder, with one file of each row of `needs` in it. Raises ScorerLoadError naming every lack at once."""
    if not model_path:
        raise ScorerLoadError(scorer, "no folder was given", f"set --reward-model-path to {hint}")
    folder = Path(model_path)
    if not folder.is_dir():
        raise ScorerLoadError(scorer, f"{folder} is not a folder", f"set --reward-model-path to {hint}")
    lacks = [
        f"{what} ({' or '.join(names)})"
        for what, names in needs.items()
        if not any((folder / n).is_file() for n in names)
    ]
    if lacks:
        raise ScorerLoadError(scorer, f"{folder} lacks {', '.join(lacks)}", f"copy the whole of {hint} there")
    return folder


def first_file(folder: Path, names: tuple[str, ...]) -> Path:
    """The first of `names` that is in `folder`; `checked_folder` made sure there is one."""
    return next(folder / name for name in names if (folder / name).is_file())


def need_package(scorer: str, module: str, install: str) -> ModuleType:
    """Imports `module`, or raises ScorerLoadError that names the package and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ScorerLoadError(scorer, f"it needs the package {module}: {error}", f"pip install '{install}'") from error
