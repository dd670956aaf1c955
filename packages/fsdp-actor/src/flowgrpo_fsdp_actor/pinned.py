"""Page-locked host memory, made by several threads at once.

The kernel hands a thread new pages at 1.5 GB/s where we measured, so torch's own pinned allocations took half a
minute for 40 GB. Here the pages are faulted in by many threads, as huge ones where the kernel has them, and locked
after that.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

THREADS = min(16, os.cpu_count() or 1)


def pinned_slabs(sizes: Sequence[int]) -> list[Tensor]:
    """uint8 tensors of `sizes` bytes, zero, page-locked as long as they or views of them live."""
    torch.cuda.current_device()  # the context must be there before threads ask for it
    with ThreadPoolExecutor(THREADS, thread_name_prefix="pinning") as threads:
        return list(threads.map(_pinned_slab, sizes))


def _pinned_slab(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    address = slab.data_ptr()
    ctypes.memset(address, 0, size)
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(address, size, 0))
    # Run when the last tensor over it lets go of the mapping, and not at exit, when CUDA may be gone already.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return slab
