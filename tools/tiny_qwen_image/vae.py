"""The tiny AutoencoderKLQwenImage: one latent pixel for 4 x 4 pixels, 16 channels, trained on rendered shapes.

Shapes: B pictures, C channels, F = 1 frame, H x W pixels, h x w latent pixels.
"""

import math
import time
from functools import partial

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor

LATENT_CHANNELS = 16


def new_vae() -> AutoencoderKLQwenImage:
    """Untrained weights; `latents_mean` and `latents_std` are measured after training."""
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def use_one_frame(vae: AutoencoderKLQwenImage) -> None:
    """Runs the causal 3-D convolutions of this object as 2-D ones: for one frame the same, at a third of the work.

    The frames before the first are zeros, so of the kernel's temporal taps only the last one sees the picture.
    """
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d) and module.stride[0] == 1:
            module.forward = partial(_one_frame_convolution, module)


def _one_frame_convolution(module: QwenImageCausalConv3d, x_BCFHW: Tensor, cache_x: Tensor | None = None) -> Tensor:
    if cache_x is not None or x_BCFHW.shape[2] != 1:
        raise ValueError(f"use_one_frame serves single pictures, got {x_BCFHW.shape[2]} frames")
    left, _, top, _, _, _ = module._padding
    kernel = module.weight[:, :, -1]
    y_BCHW = torch.nn.functional.conv2d(x_BCFHW[:, :, 0], kernel, module.bias, module.stride[1:], (top, left))
    return y_BCHW[:, :, None]


def train_vae(
    vae: AutoencoderKLQwenImage,
    picture_BCHW: Tensor,
    *,
    steps: int,
    batch: int = 64,
    lr: float = 2e-3,
    kl: float = 1e-5,
) -> list[dict[str, float]]:
    """Fits `vae` to pictures in [-1, 1] (L1 + 2 x squared error + `kl` x divergence per latent); returns its curve."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr, betas=(0.9, 0.99))
    curve, started = [], time.time()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 50) * (0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)
        rows = torch.randint(len(picture_BCHW), (batch,), device=picture_BCHW.device)
        x = picture_BCHW[rows][:, :, None]
        posterior = vae.encode(x).latent_dist
        error = vae.decode(posterior.sample()).sample - x
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        (error.abs().mean() + 2 * error.square().mean() + kl * divergence).backward()
        torch.nn.utils.clip_grad_norm_([p for p in vae.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 40) == 0:
            psnr = 10 * math.log10(4 / error.square().mean().item())
            curve.append({"step": step, "psnr_db": psnr, "kl": divergence.item(), "seconds": time.time() - started})
            print("vae", curve[-1], flush=True)
    return curve


@torch.no_grad()
def measure_latents(vae: AutoencoderKLQwenImage, picture_BCHW: Tensor) -> None:
    """Writes the latents' mean and standard deviation per channel into the config, as the pipeline expects them."""
    mean_BCFhw = torch.cat([vae.encode(x[:, :, None]).latent_dist.mode() for x in picture_BCHW.split(512)])
    mean, std = mean_BCFhw.mean((0, 2, 3, 4)), mean_BCFhw.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


def _moments(vae: AutoencoderKLQwenImage, like: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(
        torch.tensor(getattr(vae.config, name), device=like.device, dtype=like.dtype).view(1, -1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, picture_BCHW: Tensor) -> Tensor:
    """Normalised latents [B, 16, h, w]."""
    mean, std = _moments(vae, picture_BCHW)
    return (vae.encode(picture_BCHW[:, :, None]).latent_dist.mode()[:, :, 0] - mean) / std


@torch.no_grad()
def decode(vae: AutoencoderKLQwenImage, latent_BChw: Tensor) -> Tensor:
    """Pictures in [-1, 1], [B, 3, H, W]."""
    mean, std = _moments(vae, latent_BChw)
    return vae.decode((latent_BChw * std + mean)[:, :, None]).sample[:, :, 0].clamp(-1, 1)


def psnr(vae: AutoencoderKLQwenImage, picture_BCHW: Tensor) -> float:
    """Decibels of pictures through the VAE and back."""
    error = decode(vae, encode(vae, picture_BCHW)) - picture_BCHW
    return 10 * math.log10(4 / error.square().mean().item())
