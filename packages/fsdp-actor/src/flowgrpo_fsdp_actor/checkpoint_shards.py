"""The tensors of a checkpoint on disk: each rank writes its pieces, and any number of ranks reads its own rows of them.

The files are safetensors in the layout of torch's DCP (its HuggingFaceStorageReader reads and reshards them), but
written and read here, as checked streams, several files at a time: memory stays at a few buffers, the disk is what
limits, and the error of any file is raised. torch 2.11's writer of this layout first builds a rank's whole file in
memory, beside a copy of all its tensors (120 GB for 40 GB of state); with several threads, both it and the reader
lose their errors, so that a full disk would go unnoticed.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from flowgrpo_rollout_sglang.files import fsync_folder
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

from flowgrpo_fsdp_actor.checkpoint_blocks import CHECKED, RESTORE, CheckedFile, read_checked, staging, write_checked
from flowgrpo_fsdp_actor.errors import CheckpointError
from flowgrpo_fsdp_actor.safetensors_header import DTYPE_NAMES, DTYPES, header_bytes
from flowgrpo_fsdp_actor.sharding import local_rows

FILE_BYTES = 256 * 2**20
"""Of a file, at most, but for the tensor that ends it: files are written, and read, several at a time."""
WRITERS, READERS = 8, 8
"""Files at a time, in each rank: while one thread copies from the GPU and checks, others keep the disk busy."""
BUFFER_BYTES = 16 * 2**20
"""Of each of them."""
HEADER_BYTES = 100 * 10**6
"""No longer header is parsed: safetensors' own limit."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one tensor."""

    name: str
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    local: Tensor


@dataclass(frozen=True)
class StoredPiece:
    """A piece in a file."""

    file: CheckedFile
    start: int
    """Its first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int
    """Where it begins in the whole tensor; pieces are runs of dimension 0."""

    @property
    def end_row(self) -> int:
        return self.first_row + (self.shape[0] if self.shape else 1)

    @property
    def row_elements(self) -> int:
        return prod(self.shape[1:])


def write_shards(state: Mapping[str, Tensor], folder: Path, rank: int) -> dict[str, tuple[int, ...]]:
    """Writes this rank's pieces of `state` into `folder`; on the disk when it returns. Raises OSError.

    Returns file name -> the checksums that `stored_pieces` asks for.
    """
    groups = _groups(list(_pieces(state, rank)))
    names = [f"rank{rank:05d}-{number:05d}.safetensors" for number in range(len(groups))]
    files = [(folder / name, group) for name, group in zip(names, groups, strict=True)]
    most = max((sum(piece.local.nbytes for piece in group) for group in groups), default=0)
    checksums = _at_once(WRITERS, most, [piece.local for group in groups for piece in group], _write_file, files)
    fsync_folder(folder)
    return dict(zip(names, checksums, strict=True))


def stored_pieces(folder: Path, checksums: Mapping[str, Sequence[int]]) -> dict[str, list[StoredPiece]]:
    """Every tensor in `folder`, with its pieces in the order of their rows.

    Args:
        checksums: of every file, by its name in `folder`, as `write_shards` returned them.

    Raises CheckpointError for a file that is no safetensors file of ours, that is not the one that was saved as far
    as it must be read here, or a tensor of which rows are missing.
    """
    pieces: dict[str, list[StoredPiece]] = {}
    for name, crcs in sorted(checksums.items()):
        path = folder / Path(name).name
        try:
            for tensor, piece in _read_header(CheckedFile(path, tuple(crcs))):
                pieces.setdefault(tensor, []).append(piece)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(str(path), f"cannot be read ({type(error).__name__}: {error})", RESTORE) from error
    for tensor, of_one in pieces.items():
        of_one.sort(key=lambda piece: piece.first_row)
        whole = of_one[0].first_row == 0 and all(
            one.end_row == other.first_row and one.shape[1:] == other.shape[1:] for one, other in pairwise(of_one)
        )
        if not whole:
            raise CheckpointError(str(folder), f"rows of {tensor} are missing, or there twice", RESTORE)
    return pieces


def whole_shape(pieces: Sequence[StoredPiece]) -> tuple[int, ...]:
    """The shape of the tensor that `pieces` make."""
    last = pieces[-1]
    return (last.end_row, *last.shape[1:]) if last.shape else ()


def read_shards(live: Mapping[str, Tensor], stored: Mapping[str, Sequence[StoredPiece]]) -> None:
    """Fills this rank's rows of every tensor of `live` from the files, each byte checked before it is used.

    Raises CheckpointError for a file that was changed or cut, OSError; parts of `live` have then been filled.
    """
    reads: dict[CheckedFile, list[tuple[int, torch.dtype, Tensor]]] = {}
    for name, tensor in live.items():
        first, local = local_rows(tensor)
        rows = local.detach().view(-1)  # never a copy: it would be filled in its place
        end = first + (local.shape[0] if local.dim() else 1)
        for piece in stored[name]:
            start, stop = max(first, piece.first_row), min(end, piece.end_row)
            if start < stop:
                width = piece.row_elements
                target = rows[(start - first) * width : (stop - first) * width]
                at = piece.start + (start - piece.first_row) * width * piece.dtype.itemsize
                reads.setdefault(piece.file, []).append((at, piece.dtype, target))
    _at_once(READERS, FILE_BYTES, list(live.values()), read_checked, reads.items())


def _at_once(
    workers: int, most: int, tensors: Sequence[Tensor], work: Callable[..., Any], files: Iterable[tuple]
) -> list[Any]:
    """`work(buffer, *of_one)` for each of `files`, of `most` bytes; raises the first error, once no worker runs."""
    files = list(files)
    workers = min(workers, len(files))
    each = min(BUFFER_BYTES, (most // CHECKED + 1) * CHECKED)
    pinned = any(tensor.is_cuda for tensor in tensors)
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for buffer in staging(workers * each, pinned=pinned).split(each) if files else ():
        buffers.put(buffer)
    card = torch.cuda.current_device() if pinned else None

    def with_a_buffer(of_one: tuple) -> Any:
        if card is not None:
            torch.cuda.set_device(card)  # a new thread begins on card 0
        buffer = buffers.get()
        try:
            return work(buffer, *of_one)
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(max(1, workers), "checkpoint") as pool:
        running = [pool.submit(with_a_buffer, of_one) for of_one in files]
    return [one.result() for one in running]


def _read_header(stored: CheckedFile) -> Iterator[tuple[str, StoredPiece]]:
    with open(stored.path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, HEADER_BYTES):
            raise ValueError(f"its header should have {length} bytes")
        head = bytearray((8 + length) // CHECKED * CHECKED + CHECKED)
        stored.fill(file, 0, memoryview(head))
    entries = json.loads(bytes(head[8 : 8 + length]))
    offsets = json.loads(entries.pop("__metadata__")[CUSTOM_METADATA_KEY])
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        first, *inner = offsets[name][SAVED_OFFSETS_KEY] or (0,)
        start = 8 + length + begin
        whole_numbers = all(type(value) is int and value >= 0 for value in (begin, end, first, *shape))
        if not whole_numbers or end - begin != prod(shape) * dtype.itemsize or 8 + length + end > size or any(inner):
            raise ValueError(f"{name} is not where its header says")
        if start % dtype.itemsize:
            raise ValueError(f"{name} does not begin at a multiple of its elements' size")
        yield name, StoredPiece(stored, start, dtype, shape, first)


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
    """The pieces of each file. Where there are several, as many files as keep all writers busy to the end."""
    total = sum(piece.local.nbytes for piece in pieces)
    rounds = -(-total // (FILE_BYTES * WRITERS))
    limit = FILE_BYTES if total <= FILE_BYTES else -(-total // (rounds * WRITERS))
    groups: list[list[Piece]] = []
    filled = limit
    for piece in pieces:
        if filled >= limit:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.local.nbytes
    return groups


def _write_file(buffer: Tensor, path: Path, pieces: Sequence[Piece]) -> tuple[int, ...]:
    # Wider elements first: none then lies across two blocks.
    pieces = sorted(pieces, key=lambda piece: -piece.local.element_size())
    first = torch.frombuffer(bytearray(_header(pieces)), dtype=torch.uint8)
    return write_checked(buffer, path, chain([first], (piece.local.contiguous() for piece in pieces)))


def _header(pieces: Sequence[Piece]) -> bytes:
    """A file's header, with DCP's word on where each piece belongs."""
    offsets = {piece.name: {SAVED_OFFSETS_KEY: piece.offsets} for piece in pieces}
    metadata = {
        CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
    }
    return header_bytes({piece.name: (DTYPE_NAMES[piece.local.dtype], piece.local.shape) for piece in pieces}, metadata)
