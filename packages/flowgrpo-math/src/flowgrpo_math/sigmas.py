"""The sigma schedule of Qwen-Image: dynamic shift by resolution, then the terminal stretch.

Sigma is the share of noise in a latent, x = (1 - sigma) * data + sigma * noise: dimensionless, from 1 to 0.
"""

import math

import torch
from torch import Tensor


def qwen_image_sigmas(
    num_steps: int,
    image_seq_len: int,
    *,
    base_shift: float = 0.5,
    max_shift: float = 0.9,
    base_image_seq_len: int = 256,
    max_image_seq_len: int = 8192,
    shift_terminal: float | None = 0.02,
) -> Tensor:
    """Sigmas of `num_steps` denoising steps, [T + 1] float64 on the CPU: 1, ..., `shift_terminal`, 0.

        u     = linspace(1, 1 / T, T)
        mu    = base_shift + (image_seq_len - base_image_seq_len) * slope,
                slope = (max_shift - base_shift) / (max_image_seq_len - base_image_seq_len)
        s     = e^mu / (e^mu + 1 / u - 1)                                  (exponential time shift)
        sigma = 1 - (1 - s) * (1 - shift_terminal) / (1 - s[T - 1])        (terminal stretch), then 0

    Source: `FlowMatchEulerDiscreteScheduler` of diffusers with Qwen-Image's settings (the defaults here); the
    shift is that of Stable Diffusion 3, https://arxiv.org/abs/2403.03206.

    Args:
        num_steps: T, at least 1.
        image_seq_len: packed image tokens, (height / 16) * (width / 16): 576 at 384 x 384. At least 1.
        shift_terminal: sigma where the last step begins, in (0, 1); None leaves the stretch out.

    Raises:
        ValueError: an argument outside the domain above. One step with a terminal stretch is such a case: its
            only sigma, 1, is both the first, which must stay, and the last, which must move.
    """
    if num_steps < 1 or image_seq_len < 1:
        raise ValueError(f"num_steps = {num_steps}, image_seq_len = {image_seq_len}: both must be at least 1")
    if max_image_seq_len <= base_image_seq_len:
        raise ValueError(
            f"max_image_seq_len = {max_image_seq_len} must be above base_image_seq_len = {base_image_seq_len}"
        )
    slope = (max_shift - base_shift) / (max_image_seq_len - base_image_seq_len)
    mu = base_shift + (image_seq_len - base_image_seq_len) * slope
    unshifted = torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float64)
    sigmas = math.exp(mu) / (math.exp(mu) + (1.0 / unshifted - 1.0))
    if shift_terminal is not None:
        if not 0.0 < shift_terminal < 1.0:
            raise ValueError(f"shift_terminal = {shift_terminal}: it must lie in (0, 1); None turns the stretch off")
        if num_steps == 1:
            raise ValueError("num_steps = 1 cannot be stretched to shift_terminal; pass shift_terminal=None")
        sigmas = 1.0 - (1.0 - sigmas) * ((1.0 - shift_terminal) / (1.0 - sigmas[-1]))
    return torch.cat([sigmas, sigmas.new_zeros(1)])
