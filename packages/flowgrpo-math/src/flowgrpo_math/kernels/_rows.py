"""What the kernels share: how a candidate's row is addressed, cut into chunks, and summed in one launch.

A row of D elements is cut into chunks of a fixed length, one program each, so that one candidate alone still fills
many multiprocessors. The program that finishes a row last adds the row's chunk sums in their order. Neither the
cut nor the order depends on the batch, so a candidate has the same bits alone and in any batch, run after run.

Shapes: B candidates (rows), D latent elements of one candidate.
"""

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 8192
"""Elements of one program. Fixed: it decides the order of the sum, hence the bits."""
BLOCK = 2048
"""Elements that a program adds at a time; divides CHUNK, and as fixed as it is."""
WARPS = 8
MAX_REGISTERS = 40
"""Of a thread of the forward log-prob: with 40, six programs fit a multiprocessor of an H200; with 41, five."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_MAX_SPAN = 2**31 - 1  # column offsets inside a row are 32-bit
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Rows(NamedTuple):
    """A [B, ...] tensor as B rows of D elements: element `c` of row `b` lies at

    b * row + (c // inner_size) * outer + (c % inner_size) * inner,  or  b * row + c * inner where inner_size is 0.
    """

    tensor: Tensor
    inner_size: int
    row: int
    outer: int
    inner: int


def as_rows(tensor: Tensor) -> Rows:
    """Views any tensor whose trailing dimensions merge into one or two strides; copies others.

    Without a copy: contiguous latents, a slice of a trajectory (`latents[:, k]`), of tokens or of channels.
    """
    if tensor.is_contiguous():
        return Rows(tensor, 0, tensor.numel() // tensor.shape[0], 0, 1)
    dims: list[tuple[int, int]] = []  # (size, stride), outermost first
    for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    span = sum((size - 1) * stride for size, stride in dims)
    if len(dims) > 2 or span > _MAX_SPAN:
        return Rows(tensor.contiguous(), 0, math.prod(tensor.shape[1:]), 0, 1)
    if len(dims) == 2:
        return Rows(tensor, dims[1][0], tensor.stride(0), dims[0][1], dims[1][1])
    return Rows(tensor, 0, tensor.stride(0), 0, dims[0][1] if dims else 1)


def check_device_and_dtype(**tensors: Tensor) -> None:
    """Raises ValueError or TypeError for what the kernels cannot take, with the remedy."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; the kernels take float32, bfloat16 and float16: convert it, "
                "or use the torch function of the same name"
            )
        if tensor.device.type != "cuda" and not _INTERPRETED:
            raise ValueError(
                f"{name} is on {tensor.device}; the kernels need CUDA tensors: move it, use the torch function of "
                "the same name, or set TRITON_INTERPRET=1 before Triton is imported"
            )


def row_coefficients(coefficients: tuple[Tensor, ...], B: int, device: torch.device) -> tuple[Tensor, ...]:
    """Each as [B] float32 on `device`, all of one stride; one number for all rows becomes a view of stride 0."""
    if any(c.device != device or c.dtype != torch.float32 for c in coefficients):
        packed = torch.stack(coefficients).to(torch.float32)
        if device.type == "cuda" and not packed.is_cuda:
            packed = packed.pin_memory()  # a copy from pageable memory would wait for all that the stream has to do
        coefficients = tuple(packed.to(device, non_blocking=True))
    if coefficients[0].shape[0] != B:
        coefficients = tuple(c.expand(B) for c in coefficients)
    if any(c.stride(0) != coefficients[0].stride(0) for c in coefficients):
        coefficients = tuple(c.contiguous() for c in coefficients)
    return coefficients


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: makes it the tensor's own where it is another."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def num_chunks(D: int) -> int:
    """Programs of one row."""
    return -(-D // CHUNK)


def reduce_width(chunks: int) -> int:
    """Chunk sums that a row's last program adds at once: a power of two that one warp covers for usual images."""
    return min(1024, 1 << (chunks - 1).bit_length())


_counters: dict[tuple[torch.device, int], Tensor] = {}
_graph_counters: dict[torch.device, Tensor] = {}
_GRAPH_COUNTERS = 1 << 20  # 4 MB per device


def row_counters(B: int, device: torch.device) -> Tensor:
    """[B] int32 zeros, in which the programs of a row count themselves; each launch leaves zeros again.

    One buffer for each stream, because launches of one stream never overlap. A launch that a CUDA graph captures
    gets counters of its own for good, cut from a pool, because a replay may overlap with anything but itself; with
    no pool yet (no call came before the capture), or an empty one, the graph zeroes them by a memset at each replay.
    """
    if device.type != "cuda":
        return torch.zeros(B, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        pool = _graph_counters.get(device)
        if pool is None or pool.shape[0] < B:
            return torch.zeros(B, dtype=torch.int32, device=device)
        _graph_counters[device] = pool[B:]
        return pool[:B]
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    counters = _counters.get(key)
    if counters is None or counters.shape[0] < B:
        counters = _counters[key] = torch.zeros(max(B, 1024), dtype=torch.int32, device=device)
        if device not in _graph_counters:
            _graph_counters[device] = torch.zeros(_GRAPH_COUNTERS, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # once per process: a graph may read the pool on any stream
    return counters


@triton.jit
def load_row(ptr, row, column, D, row_stride, outer_stride, inner_stride, INNER: tl.constexpr):
    """Elements `column` of one row as float32, 0 past its end."""
    if INNER == 0:  # noqa: SIM108  (decided when the kernel is compiled, which a conditional expression is not)
        offset = column * inner_stride
    else:
        offset = (column // INNER) * outer_stride + (column % INNER) * inner_stride
    return tl.load(ptr + row * row_stride + offset, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def standard_score(x, velocity, x_next, x_scale, v_scale, inv_std):
    """z of `x_next` under the step. Spelled in fma, so that every kernel rounds it the same way."""
    return (x_next - tl.fma(v_scale, velocity, x_scale * x)) * inv_std


@triton.jit
def store_logp_when_last(
    chunk_sum,  # this program's sum of z^2
    row,
    chunk,
    D,
    std,
    chunk_sums_ptr,  # [B, CHUNKS] float32 scratch
    counters_ptr,  # [B] int32, zeros before and after
    logp_ptr,  # [B] float32
    HALF_LOG_2PI: tl.constexpr,
    CHUNKS: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Publishes a chunk's sum; the row's last program adds them all in order and stores the log-prob."""
    if CHUNKS == 1:
        tl.store(logp_ptr + row, -0.5 * (chunk_sum / D) - tl.log(std) - HALF_LOG_2PI)
    else:
        tl.store(chunk_sums_ptr + row * CHUNKS + chunk, chunk_sum)
        tl.debug_barrier()  # every thread's store comes before the count, which publishes it
        arrived = tl.atomic_add(counters_ptr + row, 1, sem="acq_rel")
        if arrived == CHUNKS - 1:
            sums = tl.zeros([REDUCE], dtype=tl.float32)
            for start in tl.static_range(0, CHUNKS, REDUCE):
                index = start + tl.arange(0, REDUCE)
                at = chunk_sums_ptr + row * CHUNKS + index
                # .cg: the other programs' stores are in L2, and this multiprocessor's L1 may hold older lines.
                sums += tl.load(at, mask=index < CHUNKS, other=0.0, cache_modifier=".cg")
            tl.store(logp_ptr + row, -0.5 * (tl.sum(sums) / D) - tl.log(std) - HALF_LOG_2PI)
            tl.store(counters_ptr + row, 0)
