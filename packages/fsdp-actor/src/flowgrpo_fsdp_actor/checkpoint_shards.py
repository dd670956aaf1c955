"""The tensors of a checkpoint on disk: each rank writes its pieces, and any number of ranks reads its own rows of them.

The files are safetensors in the layout of torch's DCP (its HuggingFaceStorageReader reads and reshards them), but
written and read here, as streams, several files at a time: memory stays near a few tensors, the disk is what limits,
and the error of any file is raised. torch 2.11's writer of this layout first builds a rank's whole file in memory,
beside a copy of all its tensors (120 GB for 40 GB of state); with several threads, both it and the reader lose their
errors, so that a full disk would go unnoticed.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

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

from flowgrpo_fsdp_actor.errors import CheckpointError
from flowgrpo_fsdp_actor.sharding import local_rows

FILE_BYTES = 1 << 30
"""A file ends with the tensor that takes it past this size: files are written, and read, several at a time."""
WRITERS = READERS = 4
"""Files at a time, in each rank."""
BUFFER_BYTES = 64 * 2**20
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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

    path: Path
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


def write_shards(state: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Writes this rank's pieces of `state` into `folder`; on the disk when it returns. Raises OSError."""
    groups = _groups(list(_pieces(state, rank)))
    paths = [folder / f"rank{rank:05d}-{number:05d}.safetensors" for number in range(len(groups))]
    _at_once(WRITERS, _write_file, zip(paths, groups, strict=True))
    fsync_folder(folder)


def stored_pieces(folder: Path) -> dict[str, list[StoredPiece]]:
    """Every tensor in `folder`, with its pieces in the order of their rows.

    Raises CheckpointError for a file that is no safetensors file of ours, or a tensor of which rows are missing.
    """
    pieces: dict[str, list[StoredPiece]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            for name, piece in _read_header(path):
                pieces.setdefault(name, []).append(piece)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                str(path), f"cannot be read ({type(error).__name__}: {error})", "restore the file"
            ) from error
    for name, of_one in pieces.items():
        of_one.sort(key=lambda piece: piece.first_row)
        ends = [0, *(piece.end_row for piece in of_one)]
        if any(piece.first_row != end for piece, end in zip(of_one, ends[:-1], strict=True)):
            raise CheckpointError(str(folder), f"rows of {name} are missing", "restore the checkpoint")
    return pieces


def whole_shape(pieces: Sequence[StoredPiece]) -> tuple[int, ...]:
    """The shape of the tensor that `pieces` make."""
    last = pieces[-1]
    return (last.end_row, *last.shape[1:]) if last.shape else ()


def read_shards(live: Mapping[str, Tensor], stored: Mapping[str, Sequence[StoredPiece]]) -> None:
    """Fills this rank's rows of every tensor of `live` from the files. Raises OSError, ValueError for a cut file."""
    reads: dict[Path, list[tuple[StoredPiece, int, Tensor]]] = {}
    for name, tensor in live.items():
        first, local = local_rows(tensor)
        rows = local.detach().view(-1)  # never a copy: it would be filled in its place
        end = first + (local.shape[0] if local.dim() else 1)
        for piece in stored[name]:
            start, stop = max(first, piece.first_row), min(end, piece.end_row)
            if start < stop:
                width = piece.row_elements
                target = rows[(start - first) * width : (stop - first) * width]
                reads.setdefault(piece.path, []).append((piece, (start - piece.first_row) * width, target))
    _at_once(READERS, _read_file, reads.items())


def _at_once(workers: int, work: Callable[..., None], arguments: Iterable[tuple]) -> None:
    """`work(*a)` for all `arguments`; raises the first error, once no worker runs any more."""
    card = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def on_the_same_card() -> None:
        if card is not None:  # a new thread begins on card 0, and pinning there would open a context on it
            torch.cuda.set_device(card)

    with ThreadPoolExecutor(workers, "checkpoint", on_the_same_card) as pool:
        running = [pool.submit(work, *of_one) for of_one in arguments]
    for one in running:
        one.result()


def _read_file(path: Path, reads: Sequence[tuple[StoredPiece, int, Tensor]]) -> None:
    """Each (piece, its first wanted element, where the elements go), cast where the dtypes differ."""
    largest = max(target.numel() * piece.dtype.itemsize for piece, _, target in reads)
    buffer = _buffer([target for _, _, target in reads], largest)
    with open(path, "rb", buffering=0) as file:
        for piece, first, target in reads:
            file.seek(piece.start + first * piece.dtype.itemsize)
            for part in target.split(max(1, buffer.numel() // piece.dtype.itemsize)):
                into = buffer[: part.numel() * piece.dtype.itemsize]
                _read_all(file, into.numpy().data, path)
                part.copy_(into.view(piece.dtype))


def _read_all(file: io.FileIO, into: memoryview, path: Path) -> None:
    while into:
        count = file.readinto(into)
        if not count:
            raise ValueError(f"{path} ends in the middle of a tensor")
        into = into[count:]


def _read_header(path: Path) -> Iterator[tuple[str, StoredPiece]]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size - 8:
            raise ValueError(f"its header should have {length} bytes")
        entries = json.loads(file.read(length))
    offsets = json.loads(entries.pop("__metadata__")[CUSTOM_METADATA_KEY])
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        first, *inner = offsets[name][SAVED_OFFSETS_KEY] or (0,)
        if end - begin != prod(shape) * dtype.itemsize or 8 + length + end > size or any(inner):
            raise ValueError(f"{name} is not where its header says")
        yield name, StoredPiece(path, 8 + length + begin, dtype, shape, first)


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
    buffer = _buffer([piece.local for piece in pieces])
    try:
        with open(path, "wb") as file:
            header = _header(pieces)
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for piece in pieces:
                _write_tensor(file, piece.local, buffer)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # a write on a full disk does not say where
        raise


def _write_tensor(file: io.BufferedWriter, tensor: Tensor, buffer: Tensor) -> None:
    """Through `buffer`: a host copy of the whole tensor would cost fresh pages, which take longer than the bytes."""
    flat = tensor.contiguous().view(-1)
    for part in flat.split(buffer.numel() // tensor.element_size()):
        host = buffer[: part.nbytes]
        host.view(tensor.dtype).copy_(part)
        file.write(host.numpy().data)


def _buffer(tensors: Sequence[Tensor], largest: int | None = None) -> Tensor:
    """[bytes] uint8 on the host, pinned for tensors on a GPU; no longer than the largest of them."""
    nbytes = max(tensor.nbytes for tensor in tensors) if largest is None else largest
    pinned = any(tensor.is_cuda for tensor in tensors)
    return torch.empty(min(BUFFER_BYTES, nbytes), dtype=torch.uint8, pin_memory=pinned)


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
