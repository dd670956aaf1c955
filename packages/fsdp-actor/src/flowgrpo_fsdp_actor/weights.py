"""Weights on disk: parts of tensors straight from safetensors files, so that a rank reads only its own shard."""

import json
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowgrpo_fsdp_actor.errors import ModelFolderError


class SafetensorsFolder:
    """One diffusers component: a folder of one or several safetensors files with an optional index."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, safe_open] = {}

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Rows `start` to `end` of tensor `name`, as stored. Raises ModelFolderError where it is missing."""
        file = self._file_of.get(name)
        if file is None:
            raise ModelFolderError(str(self._folder), f"no tensor {name}", "is it the folder of this model's class?")
        return self._handle(file).get_slice(name)[start:end]

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelFolderError(str(self._folder), f"{file} cannot be read: {error}") from None
        return self._open[file]

    @cached_property
    def _file_of(self) -> dict[str, str]:
        index = sorted(self._folder.glob("*.safetensors.index.json"))
        if index:
            return json.loads(index[0].read_text())["weight_map"]
        files = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not files:
            raise ModelFolderError(str(self._folder), "there is no safetensors file")
        return {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118
