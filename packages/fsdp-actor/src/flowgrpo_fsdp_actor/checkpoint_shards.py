"""A rank's part of a checkpoint: safetensors files in the layout that DCP's HuggingFaceStorageReader reads.

Written as a stream, tensor by tensor, several files at a time, so that memory stays near a few tensors, the disk is
what limits, and an error of any writer is raised. torch 2.11's own writer of this layout first builds a rank's
whole file in memory, beside a copy of all its tensors (120 GB for 40 GB of state), and with several threads loses
their errors: a full disk would go unnoticed.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

FILE_BYTES = 1 << 30
"""A file ends with the tensor that takes it past this size: files are written, and read, several at a time."""
WRITERS = 4
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one tensor."""

    name: str
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    local: Tensor


def write_shards(state: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Writes this rank's pieces of `state` into `folder`; on the disk when it returns. Raises OSError."""
    groups = _groups(list(_pieces(state, rank)))
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoint") as writers:
        written = [
            writers.submit(_write_file, folder / f"rank{rank:05d}-{number:05d}.safetensors", group)
            for number, group in enumerate(groups)
        ]
        for one in written:
            one.result()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(state: Mapping[str, Tensor], rank: int) -> Iterator[Piece]:
    """Shards where the tensor is sharded; of a tensor that every rank holds whole, rank 0's."""
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if tensor.to_local().numel():
                yield Piece(name, tuple(offsets), tensor.to_local().detach())
        elif rank == 0:
            yield Piece(name, (0,) * tensor.dim(), tensor.detach())


def _groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    filled = FILE_BYTES
    for piece in pieces:
        if filled >= FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.local.nbytes
    return groups


def _write_file(path: Path, pieces: Sequence[Piece]) -> None:
    with open(path, "wb") as file:
        header = _header(pieces)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for piece in pieces:
            file.write(piece.local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(pieces: Sequence[Piece]) -> bytes:
    """A safetensors header with DCP's word on where each piece belongs."""
    offsets = {piece.name: {SAVED_OFFSETS_KEY: piece.offsets} for piece in pieces}
    entries: dict[str, object] = {
        "__metadata__": {
            CUSTOM_METADATA_KEY: json.dumps(offsets),
            DCP_VERSION_KEY: str(HF_DCP_VERSION),
            FORMAT_KEY: FORMAT_VALUE,
        }
    }
    start = 0
    for piece in pieces:
        end = start + piece.local.nbytes
        entries[piece.name] = {
            "dtype": DTYPE_NAMES[piece.local.dtype],
            "shape": list(piece.local.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)
