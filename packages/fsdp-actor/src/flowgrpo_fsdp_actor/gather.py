"""Whole tensors from FSDP's shards, for the weight sync: each byte is moved once, by the gather itself.

FSDP's own `unshard` copies shards together, gathers them, copies the result apart, and frees it with its unit.
Here a chunk of tensors is one call of the backend (a group of all-gathers) that reads every shard where it lies and
writes every whole tensor where it stays. The next chunk travels while the caller still works on the last one.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK_BYTES = 2**30
"""Bytes of whole tensors in one gather; two chunks are alive at a time, beside what the caller holds."""


def whole_tensors(
    tensors: Sequence[Tensor], *, device: torch.device | str, dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """The whole of each tensor, in order, on `device`; each is valid as long as it is held.

    Collective where a tensor is sharded over several ranks: every rank must take them to the end. A shard is cast to
    `dtype` before it travels (None: not at all); what one rank holds whole is handed out as it is.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    ahead: _Chunk | None = None
    for part in _chunks(tensors, CHUNK_BYTES):
        chunk, ahead = ahead, _Chunk(part, device, dtype)
        if chunk is not None:
            yield from chunk.wait()
            chunk = None  # frees it before the next one is started
    if ahead is not None:
        yield from ahead.wait()


def _chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """Runs of tensors of at most `chunk_bytes`, or of one tensor."""
    part: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if part and filled + tensor.nbytes > chunk_bytes:
            yield part
            part, filled = [], 0
        part.append(tensor)
        filled += tensor.nbytes
    if part:
        yield part


class _Chunk:
    """Tensors whose gather has begun."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None):
        self._whole = [t.to_local().to(device) if isinstance(t, DTensor) else t for t in tensors]
        self._work: dist.Work | None = None
        split = {i: t for i, t in enumerate(tensors) if isinstance(t, DTensor) and t.device_mesh.size() > 1}
        if not split:
            return
        (group,) = {t.device_mesh.get_group() for t in split.values()}
        shards = _as_sent([_padded(t) for t in split.values()], device, dtype)
        whole = [s.new_empty((group.size() * s.shape[0], *s.shape[1:])) for s in shards]
        for (i, tensor), rows in zip(split.items(), whole, strict=True):
            self._whole[i] = rows[: tensor.shape[0]]
        self._work = group.allgather_into_tensor_coalesced(whole, shards)
        self._shards = shards  # read until the gather has ended

    def wait(self) -> Iterator[Tensor]:
        """The whole tensors; what the caller then puts on its stream runs after the gather."""
        if self._work is not None:
            self._work.wait()
            self._work, self._shards = None, []
        while self._whole:
            yield self._whole.pop(0)


def _padded(tensor: DTensor) -> Tensor:
    """This rank's rows, filled up to as many as rank 0 has: FSDP gives the last ranks fewer, or none."""
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    local = tensor.to_local()
    if local.shape[0] == rows:
        return local
    padded = local.new_zeros((rows, *tensor.shape[1:]))
    padded[: local.shape[0]] = local
    return padded


def _as_sent(shards: list[Tensor], device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
    """`shards` on `device` in `dtype`: themselves where they are so already, else cast together."""
    ready = [s if s.device == device and dtype in (None, s.dtype) else torch.empty_like(s, device=device, dtype=dtype)
             for s in shards]  # fmt: skip
    pairs = [(to, s) for to, s in zip(ready, shards, strict=True) if to is not s]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [s for _, s in pairs])
    return ready
