"""The formula as one would write it first, with `mean` and no checks: the rival of the fused kernels."""

import torch
from flowgrpo_math.transition import HALF_LOG_2PI, Transition
from torch import Tensor


def plain_logp(x: Tensor, velocity: Tensor, x_next: Tensor, t: Transition) -> Tensor:
    """Log-prob of a step, [B] float32; `t` is on the device already."""
    x_scale, v_scale, std = (c[:, None, None] for c in t)
    mean = x_scale * x.float() + v_scale * velocity.float()
    log_density = -((x_next.float() - mean) ** 2) / (2 * std**2) - torch.log(std) - HALF_LOG_2PI
    return log_density.mean(dim=(1, 2))


def plain_sample_logp(x: Tensor, velocity: Tensor, noise: Tensor, t: Transition) -> tuple[Tensor, Tensor]:
    """x_next in float32 and its log-prob."""
    x_scale, v_scale, std = (c[:, None, None] for c in t)
    mean = x_scale * x.float() + v_scale * velocity.float()
    x_next = mean + std * noise.float()
    log_density = -((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - HALF_LOG_2PI
    return x_next, log_density.mean(dim=(1, 2))
