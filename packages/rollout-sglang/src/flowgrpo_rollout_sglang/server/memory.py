"""Sleep and wake by tags: device memory given back at once, filled again bit for bit.

A parameter's storage is emptied and filled in place, so that whoever holds the tensor (a weight target, a compiled
graph) still holds the right one. The host copy is one block per tag, page-locked, allocated at the first sleep and
kept; what did not change since is not copied out again: the frozen modules are copied out once in a run, and so is the
base beside an adapter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flowgrpo_rollout_sglang.pinned import pinned_block

ALIGN = 512
"""Bytes between two storages in the host block."""


class UnknownTagError(ValueError):
    """A tag that names no part of the engine."""


class Memory:
    """The sleeping and waking parts of one engine.

    Args:
        modules: tag to the modules that it stands for.
        before_release: called before any part goes to sleep; gives back what is of no use to a sleeping engine.
    """

    def __init__(self, modules: Mapping[str, Sequence[nn.Module]], before_release: Callable[[], None] | None = None):
        self._modules, self._before_release = modules, before_release
        self._storages: dict[str, list[torch.UntypedStorage]] = {}
        self._addresses: dict[str, list[int]] = {}
        self._blocks: dict[str, Tensor] = {}
        self._sizes: dict[str, list[int]] = {}
        self._dirty: dict[str, set[int] | None] = dict.fromkeys(modules)
        """Addresses of the storages of a tag that its host copy does not hold; None: of all. No key: it holds all."""
        self.asleep: set[str] = set()

    def touch(self, tag: str, written: Iterable[Tensor] | None = None) -> None:
        """Says that tensors of `tag` (None: any) may be written: the host copy of these is of no use any more."""
        dirty = self._dirty.setdefault(tag, set())
        if written is None:
            self._dirty[tag] = None
        elif dirty is not None:
            dirty |= {tensor.untyped_storage().data_ptr() for tensor in written}

    def release(self, tags: Sequence[str] | None) -> int:
        """Empties the device memory of `tags` (None: all) and returns how many bytes it gave back."""
        freed, tags = 0, self._known(tags)
        if self._before_release is not None:
            self._before_release()
        for tag in tags:
            if tag in self.asleep:
                continue
            self._storages[tag] = _own_storages(self._modules[tag])
            if _addresses(self._storages[tag]) != self._addresses.get(tag):  # other tensors, as after a cast
                self.touch(tag)
            self._copy_out(tag)
            for storage in self._storages[tag]:
                freed += storage.nbytes()
                storage.resize_(0)
            self.asleep.add(tag)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def resume(self, tags: Sequence[str] | None) -> int:
        """Fills `tags` (None: all) again and returns how many bytes came back."""
        filled = 0
        for tag in self._known(tags):
            if tag not in self.asleep:
                continue
            for storage, host in zip(self._storages[tag], self._pieces(tag), strict=True):
                storage.resize_(host.numel())
                _bytes_of(storage).copy_(host, non_blocking=True)
                filled += host.numel()
            self._addresses[tag] = _addresses(self._storages[tag])
            self.asleep.discard(tag)
        _wait()
        return filled

    def _copy_out(self, tag: str) -> None:
        if tag not in self._dirty:
            return
        dirty, sizes = self._dirty[tag], [storage.nbytes() for storage in self._storages[tag]]
        if sizes != self._sizes.get(tag):
            self._sizes[tag], dirty = sizes, None
            self._blocks.pop(tag, None)  # first let go of the old one
            nbytes = sum(_aligned(n) for n in sizes)
            pinned = any(storage.device.type == "cuda" for storage in self._storages[tag])
            self._blocks[tag] = pinned_block(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8)
        for storage, host in zip(self._storages[tag], self._pieces(tag), strict=True):
            if dirty is None or storage.data_ptr() in dirty:
                host.copy_(_bytes_of(storage), non_blocking=True)
        _wait()
        del self._dirty[tag]

    def _pieces(self, tag: str) -> list[Tensor]:
        """Where each storage of `tag` lies in the host block."""
        pieces, at = [], 0
        for size in self._sizes[tag]:
            pieces.append(self._blocks[tag][at : at + size])
            at += _aligned(size)
        return pieces

    def _known(self, tags: Sequence[str] | None) -> Sequence[str]:
        if unknown := sorted(set(tags or ()) - set(self._modules)):
            raise UnknownTagError(f"unknown tags {', '.join(unknown)}; known are {', '.join(self._modules)}")
        return list(self._modules) if tags is None else tags


def _own_storages(modules: Sequence[nn.Module]) -> list[torch.UntypedStorage]:
    """The different storages behind all parameters and buffers; one that cannot be resized is replaced first."""
    found: dict[int, torch.UntypedStorage] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel() == 0:
                continue
            if not tensor.untyped_storage().resizable():  # a mapped file
                tensor.data = tensor.data.clone()
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
    return list(found.values())


def _addresses(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    return [storage.data_ptr() for storage in storages]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
