"""Qwen-Image's VAE is one for video. For a picture, most of its work and memory is for frames that are not there.

A causal 3-D convolution pads two frames of zeros before the first one, so with a single frame only the last of its
three taps in time meets data: a 2-D convolution with that tap gives the same numbers with a third of the work. And the
decoder keeps a copy of every convolution's input for a next frame, which does not come.

On a GPU the rest is mostly waiting for memory: a norm of five passes over a map, and one of float32 in each upsampling.

Shapes: B pictures, C channels, H x W pixels; frames are the third axis.
"""

from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, rms_norm

CAUSAL_CONV, NORM, UPSAMPLE = "QwenImageCausalConv3d", "QwenImageRMS_norm", "QwenImageUpsample"
"""Classes of the same names, and of the same workings, in diffusers and in SGLang."""
EPS = 1e-20
"""Beside a mean of squares: what keeps a map of zeros from dividing by 0, as their 1e-12 beside a norm does."""


def skip_empty_frames(vae: nn.Module) -> int:
    """Makes `vae` leave out what one frame does not need; videos go as before. Returns how many layers it changed."""
    causal = [m for m in vae.modules() if type(m).__name__ == CAUSAL_CONV and m.kernel_size[0] > 1]
    for module in causal:
        module.forward = MethodType(_causal_conv, module)
    vae._decode = MethodType(_decode, vae)
    vae.decoder.forward = MethodType(_decoder, vae.decoder)
    return len(causal)


def fuse_layers(vae: nn.Module) -> int:
    """Makes `vae`'s norms one kernel each and its upsamplings one of the map's own format; for maps whose channels lie
    together (`channels_last_3d`). Norms round once instead of five times. Returns how many layers it changed."""
    norms = [m for m in vae.modules() if type(m).__name__ == NORM and m.channel_first and isinstance(m.bias, float)]
    upsamplings = [m for m in vae.modules() if type(m).__name__ == UPSAMPLE]
    for module in norms:
        module.forward = MethodType(_norm, module)
    for module in upsamplings:
        module.forward = MethodType(_upsample, module)
    return len(norms) + len(upsamplings)


def _decode(vae: nn.Module, latents: Tensor, *rest: Any, **named: Any) -> Any:
    """In place of the class's: says for how many frames its decoder will be called."""
    vae.decoder.single_frame = latents.shape[2] == 1
    return type(vae)._decode(vae, latents, *rest, **named)


def _decoder(decoder: nn.Module, x: Tensor, feat_cache: list | None = None, feat_idx: list | None = None) -> Tensor:
    """In place of the class's: without copies for a next frame where none comes."""
    if decoder.single_frame or feat_cache is None:
        return type(decoder).forward(decoder, x)
    return type(decoder).forward(decoder, x, feat_cache=feat_cache, feat_idx=feat_idx)


def _causal_conv(conv: nn.Conv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """In place of the class's; `cache_x` holds the frames before, of which a single picture has none."""
    if cache_x is not None or x.shape[2] != 1:
        return type(conv).forward(conv, x, cache_x)
    left, right, top, bottom, _, _ = conv._padding
    if (left, top) != (right, bottom):
        return type(conv).forward(conv, x, cache_x)
    frame_BCHW = conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, conv.stride[1:], padding=(top, left))
    return frame_BCHW[:, :, None]


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    """In place of the class's: x / |x| sqrt(C) gamma over the channels, which is what `rms_norm` gives."""
    return rms_norm(x.movedim(1, -1), (x.shape[1],), norm.gamma.flatten(), EPS).movedim(-1, 1)


def _upsample(upsample: nn.Upsample, x: Tensor) -> Tensor:
    """In place of the class's, which goes through float32: the nearest pixel has the same bits either way."""
    return interpolate(x, scale_factor=upsample.scale_factor, mode=upsample.mode)
