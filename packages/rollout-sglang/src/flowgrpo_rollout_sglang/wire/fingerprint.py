"""The fingerprint of one tensor's wire bytes: what the sender packed must be what the engine's parameters hold.

The bytes are read as unsigned 32-bit little-endian words w_i (a half word at the end is filled with zeros), and

    fingerprint = sum_i  w_i * fmix32(i + 1)   mod 2^64

where fmix32 is the finaliser of MurmurHash3, a bijection of 32-bit integers (Appleby, public domain). Consequences:

* a sum, so pieces may be computed in any order, by any number of threads, and added;
* one changed word is always seen: its term moves by d * key with 0 < |d| < 2^32 and 0 < key < 2^32;
* two different words that changed places are always seen, since no two positions share a key: the sum moves by
  (w_i - w_j) * (key_i - key_j), which is not 0 and is smaller than 2^64;
* anything else, such as another tensor's data or an older bucket, passes with a chance of about 2^-32.

It protects against faults, not against an adversary. `csrc` computes the same number in its copy kernels.
"""

import hashlib
import struct
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_CHUNK = {"cpu": 2**15, "cuda": 2**22}
"""Words worked on at a time: int64 temporaries should stay in a CPU's cache, launches on a GPU should be few."""
_KEPT_WORDS = 2**21
"""Words from a tensor's start whose keys are kept, 8 bytes each."""
_LOW32 = 0xFFFFFFFF


def _fmix32(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser, for int64 tensors of 32-bit values; a product mod 2^64 has the right low 32 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _LOW32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _LOW32
    return x ^ (x >> 16)


def _keys(chunk: int, size: int, device: torch.device) -> Tensor:
    """Keys of the words of one chunk, [size] int64."""
    first = chunk * size
    return _fmix32(torch.arange(first + 1, first + 1 + size, dtype=torch.int64, device=device))


@cache
def _kept_keys(chunk: int, size: int, device: torch.device) -> Tensor:
    """As `_keys`, kept: every tensor starts with these."""
    keys = _keys(chunk, size, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # another stream may be the next to read them
    return keys


def _words(flat: Tensor) -> Tensor:
    """The 32-bit words of a contiguous 1-D tensor of 2- or 4-byte elements, [W] int32."""
    if flat.element_size() == 4:
        return flat.view(torch.int32)
    halves = flat.view(torch.int16)
    if halves.numel() % 2:
        halves = torch.nn.functional.pad(halves, (0, 1))
    elif halves.data_ptr() % 4:
        halves = halves.clone()
    return halves.view(torch.int32)


def piece_fingerprint(flat: Tensor, start: int = 0) -> Tensor:
    """The part of a tensor's fingerprint that one piece adds: a scalar int64 tensor, the sum's bits mod 2^64.

    Args:
        flat: the piece, contiguous, 1-D, bfloat16 or float32 as on the wire, on any device.
        start: first byte of the piece within the tensor's wire bytes; a multiple of 4.
    """
    words = _words(flat)
    size = _CHUNK[flat.device.type]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    first, at = start // 4, 0
    while at < words.numel():
        chunk, inside = divmod(first + at, size)
        count = min(size - inside, words.numel() - at)
        keys = (_kept_keys if chunk * size < _KEPT_WORDS else _keys)(chunk, size, flat.device)
        part = words[at : at + count].to(torch.int64)
        total += part.bitwise_and_(_LOW32).mul_(keys[inside : inside + count]).sum()
        at += count
    return total


def digest(names: str, fingerprints: Sequence[int]) -> str:
    """One short text for all tensors: their `ordered_name_shape_hash` and fingerprints; 16 hex digits."""
    packed = struct.pack(f"<{len(fingerprints)}Q", *fingerprints)
    return hashlib.blake2b(names.encode() + packed, digest_size=8).hexdigest()
