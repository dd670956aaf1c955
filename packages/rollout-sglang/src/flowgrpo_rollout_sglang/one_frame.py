"""Qwen-Image's VAE is one for video. For a picture, most of its work is on frames of zeros: leave them out.

A causal 3-D convolution pads two frames of zeros before the first one, so with a single frame only the last of its
three taps in time meets data: a 2-D convolution with that tap gives the same numbers with a third of the work.

Shapes: B pictures, C channels, H x W pixels; frames are the third axis.
"""

from types import MethodType

from torch import Tensor, nn
from torch.nn.functional import conv2d

CAUSAL_CONV = "QwenImageCausalConv3d"
"""The class of the same name in diffusers and in SGLang; both keep their padding in `_padding`."""


def skip_empty_frames(vae: nn.Module) -> int:
    """Makes `vae`'s causal convolutions do so for single frames; videos go as before. Returns how many it changed."""
    causal = [m for m in vae.modules() if type(m).__name__ == CAUSAL_CONV and m.kernel_size[0] > 1]
    for module in causal:
        module.forward = MethodType(_forward, module)
    return len(causal)


def _forward(conv: nn.Conv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """In place of the class's forward; `cache_x` holds the frames before, of which a single picture has none."""
    if cache_x is not None or x.shape[2] != 1:
        return type(conv).forward(conv, x, cache_x)
    left, right, top, bottom, _, _ = conv._padding
    if (left, top) != (right, bottom):
        return type(conv).forward(conv, x, cache_x)
    frame_BCHW = conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, conv.stride[1:], padding=(top, left))
    return frame_BCHW[:, :, None]
