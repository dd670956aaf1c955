"""Model adapters: what is particular to a model family, behind one Protocol. Importing this imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from flowgrpo_fsdp_actor.errors import ModelFolderError

if TYPE_CHECKING:
    from flowgrpo_fsdp_actor.adapters.base import GenerativeModelAdapter

QWEN_IMAGE = "flowgrpo_fsdp_actor.adapters.qwen_image.QwenImageAdapter"


def load_adapter(path: str, model_path: str) -> "GenerativeModelAdapter":
    """The adapter class at the dotted `path`, for the model folder `model_path`.

    Raises ImportError or AttributeError where `path` names nothing, as `import` would.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ModelFolderError(model_path, f"--model-adapter-path {path!r} has no module", f"for example {QWEN_IMAGE}")
    return getattr(import_module(module), name)(model_path)
