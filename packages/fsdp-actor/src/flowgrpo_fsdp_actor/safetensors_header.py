"""What a safetensors file begins with, where its tensors are written one at a time: the library takes all at once."""

import json
from collections.abc import Mapping, Sequence
from math import prod

import torch

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
Layout = Mapping[str, tuple[str, Sequence[int]]]
"""What a file holds, in its order: name -> (dtype, shape), both as safetensors calls them."""


def header_bytes(layout: Layout, metadata: Mapping[str, str] | None) -> bytes:
    """Everything before the first tensor's bytes, a multiple of eight; the tensors follow in the order of `layout`."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, (dtype, shape) in layout.items():
        end = start + prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
