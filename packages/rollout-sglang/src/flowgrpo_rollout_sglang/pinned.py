"""Page-locked host memory, made by many threads at once: for the engines' and the actor's sleep.

The kernel hands a thread new pages at 1.5 to 2.7 GB/s where we measured, so torch's own pinned allocations took half a
minute for 40 GB. Here many threads fault the pages in, as huge ones where the kernel has them, before they are locked.
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
_SLICE = 64 * 2**20


def pinned_block(nbytes: int) -> Tensor:
    """[nbytes] uint8, zero, page-locked as long as it or a view of it lives. Raises RuntimeError with CUDA's reason."""
    return _locked(*faulted_block(nbytes))


def pinned_slabs(sizes: Sequence[int]) -> list[Tensor]:
    """The same of each of `sizes`, a thread for each; locking, too, is then done by several at once."""
    torch.cuda.current_device()  # the context must be there before threads ask for it

    def slab(nbytes: int) -> Tensor:
        block, memory = _mapped(nbytes)
        ctypes.memset(block.data_ptr(), 0, nbytes)
        return _locked(block, memory)

    with _threads() as threads:
        return list(threads.map(slab, sizes))


def faulted_block(nbytes: int) -> tuple[Tensor, mmap.mmap]:
    """[nbytes] uint8, zero, every page present, and the mapping that it keeps alive."""
    block, memory = _mapped(nbytes)
    start = block.data_ptr()

    def fault(offset: int) -> None:
        ctypes.memset(start + offset, 0, min(_SLICE, nbytes - offset))

    with _threads() as threads:
        list(threads.map(fault, range(0, nbytes, _SLICE)))
    return block, memory


def _mapped(nbytes: int) -> tuple[Tensor, mmap.mmap]:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8), memory


def _locked(block: Tensor, memory: mmap.mmap) -> Tensor:
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), block.numel(), 0))
    # When the last tensor over it lets go of the mapping; not at exit, when CUDA may be gone already.
    weakref.finalize(memory, cudart.cudaHostUnregister, block.data_ptr()).atexit = False
    return block


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="pinning")
