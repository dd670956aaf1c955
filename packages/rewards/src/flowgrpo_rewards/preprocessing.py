"""CLIP's picture preprocessing on the scorer's own device, in one batch per picture size.

The official processors resize one picture after the other on the CPU, with Pillow's bicubic filter. This does the
same with torch's antialiased bicubic filter and the same rounding to 8 bits. Against Pillow, a picture that shrinks
is at most 1 of 255 levels apart, one that grows 2, and under 2 % of all values differ (tests/test_clip_scorers.py).

Shapes: B pictures, C = 3 channels, H x W pixels, S = side of the model's input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)

ResizeMode = Literal["crop", "pad"]


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What a CLIP-like model wants to see."""

    size: int
    """Side of the square input, in pixels."""
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    mode: ResizeMode = "crop"
    """`crop`: the shorter edge becomes `size`, the centre is cut out. `pad`: the longer edge, black margins."""

    def __call__(self, pictures: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype) -> Tensor:
        """uint8 [H, W, 3] pictures of any sizes to one tensor [B, 3, S, S], in order."""
        out_BCSS = torch.empty(len(pictures), 3, self.size, self.size, device=device, dtype=dtype)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, picture in enumerate(pictures):
            by_shape.setdefault(picture.shape, []).append(index)
        for indices in by_shape.values():
            batch_BHWC = torch.from_numpy(np.stack([pictures[index] for index in indices]))
            batch_BCHW = batch_BHWC.to(device).permute(0, 3, 1, 2)
            out_BCSS[torch.tensor(indices, device=device)] = self._one_shape(batch_BCHW).to(dtype)
        return out_BCSS

    def _one_shape(self, batch_BCHW: Tensor) -> Tensor:
        height, width = batch_BCHW.shape[-2:]
        resized = resize_uint8(batch_BCHW, self._resized_shape(height, width))
        square = _centre(resized, self.size)
        mean, std = (torch.tensor(v, device=square.device).view(1, 3, 1, 1) for v in (self.mean, self.std))
        return (square / 255.0 - mean) / std

    def _resized_shape(self, height: int, width: int) -> tuple[int, int]:
        if self.mode == "pad":
            scale = self.size / max(height, width)
            return max(1, round(height * scale)), max(1, round(width * scale))
        # The longer edge is cut down, not rounded, as the official processors do.
        shorter, longer = min(height, width), max(height, width)
        long_side = int(self.size * longer / shorter)
        return (self.size, long_side) if height <= width else (long_side, self.size)


def resize_uint8(batch_BCHW: Tensor, shape: tuple[int, int]) -> Tensor:
    """Antialiased bicubic of uint8 pictures to `shape`: float32 whole levels 0..255, those of Pillow's BICUBIC."""
    if tuple(batch_BCHW.shape[-2:]) == shape:
        return batch_BCHW.float()
    if batch_BCHW.device.type == "cpu":  # torch has Pillow's own 8-bit filter there, several times faster
        return interpolate(batch_BCHW, shape, mode="bicubic", antialias=True, align_corners=False).float()
    return resize_in_float(batch_BCHW, shape)


def resize_in_float(batch_BCHW: Tensor, shape: tuple[int, int]) -> Tensor:
    """As `resize_uint8`, on any device. Pillow filters rows, rounds to 8 bits, then columns; so does this."""
    wide = _filter(batch_BCHW.float(), (batch_BCHW.shape[-2], shape[1]))
    return _filter(wide, shape)


def _filter(batch_BCHW: Tensor, shape: tuple[int, int]) -> Tensor:
    if tuple(batch_BCHW.shape[-2:]) == shape:
        return batch_BCHW
    resized = interpolate(batch_BCHW, shape, mode="bicubic", antialias=True, align_corners=False)
    return resized.add_(0.5).floor_().clamp_(0.0, 255.0)


def _centre(batch_BCHW: Tensor, size: int) -> Tensor:
    """Cut or padded with 0 to [size, size] around the centre; an odd pixel goes as in the official processors."""
    for axis in (-2, -1):
        length = batch_BCHW.shape[axis]
        if length > size:
            batch_BCHW = batch_BCHW.narrow(axis, (length - size) // 2, size)
        elif length < size:
            before = (size - length) // 2
            margins = [0, 0, 0, 0]
            margins[2 * (-1 - axis)], margins[2 * (-1 - axis) + 1] = before, size - length - before
            batch_BCHW = pad(batch_BCHW, margins)
    return batch_BCHW
