"""The clipped policy loss of GRPO on denoising steps.

Left out on purpose: a KL term (the recipes train without one) and any sum over steps. Every (candidate, step)
pair has a ratio and a clip of its own, so that one step that drifts out of the clip range does not silence
the others.

Shapes: B candidates, S trained steps.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_math._checks import require_finite, require_floating, require_same_shape_and_device


class ClipLoss(NamedTuple):
    """The loss, and what a run should watch. All but `loss` are detached."""

    loss: Tensor
    """Scalar, the mean over candidates and steps. Differentiable in logp."""
    ratio_BS: Tensor
    """exp(logp - anchor_logp)."""
    clip_fraction: Tensor
    """Scalar share of pairs that the clip holds: the clipped branch decides and their gradient is zero."""
    clip_fraction_S: Tensor
    """The same share for each trained step."""
    ratio_mean_S: Tensor
    """Mean ratio of each trained step; a step far from 1 was replayed differently from how it was sampled."""
    approx_kl: Tensor
    """Scalar estimate of KL(anchor || policy) in nats per element, mean of ratio - 1 - log ratio; never negative."""


def grpo_clip_loss(
    logp_BS: Tensor,
    anchor_logp_BS: Tensor,
    advantages_B: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    check_finite: bool | None = None,
) -> ClipLoss:
    """The clipped loss, per (candidate, step), then averaged over both.

        ratio = exp(logp - anchor_logp)
        loss  = mean of max(-A ratio, -A clip(ratio, 1 - eps_clip, 1 + eps_clip_high))

    Source: PPO, https://arxiv.org/abs/1707.06347, with GRPO's advantages, https://arxiv.org/abs/2402.03300, as
    Flow-GRPO uses it, arXiv 2505.05470; the wider upper bound is DAPO's, https://arxiv.org/abs/2503.14476.

    Args:
        logp_BS: log-probs under the policy that is trained, as `replay_transition_logp` returns them.
        anchor_logp_BS: the same under the policy that sampled; taken as constant.
        advantages_B: one per candidate, shared by its steps; taken as constant.
        eps_clip: in (0, 1). Log-probs are means over the latent, so useful values are small (1e-4 to 1e-3).
        eps_clip_high: upper width, above 0; None uses `eps_clip`.
        check_finite: refuse NaN and infinite inputs. None looks on the CPU alone, because on a GPU looking
            waits for it; True always looks; False never.

    Raises:
        ValueError: shapes or devices that differ, a clip width outside its range, an input that is not finite.
        TypeError: integer tensors.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    if not 0.0 < eps_clip < 1.0:
        raise ValueError(f"eps_clip = {eps_clip}; it must lie in (0, 1)")
    if not 0.0 < high < math.inf:
        raise ValueError(f"eps_clip_high = {high}; it must be above 0 and finite")
    require_floating(logp_BS=logp_BS, anchor_logp_BS=anchor_logp_BS, advantages_B=advantages_B)
    require_same_shape_and_device(logp_BS=logp_BS, anchor_logp_BS=anchor_logp_BS)
    if logp_BS.ndim != 2 or logp_BS.numel() == 0:
        raise ValueError(f"logp_BS has shape {list(logp_BS.shape)}; it must be [candidates, trained steps]")
    require_same_shape_and_device(**{"logp_BS[:, 0]": logp_BS[:, 0], "advantages_B": advantages_B})
    for name, tensor in (("logp_BS", logp_BS), ("anchor_logp_BS", anchor_logp_BS), ("advantages_B", advantages_B)):
        require_finite(name, tensor, check_finite, "a loss of it would destroy the weights")

    dtype = torch.promote_types(logp_BS.dtype, torch.float32)
    log_ratio = logp_BS.to(dtype) - anchor_logp_BS.detach().to(dtype)
    ratio = torch.exp(log_ratio)
    advantages = advantages_B.detach().to(dtype)[:, None]
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + high)
    loss = torch.maximum(unclipped, clipped).mean()

    with torch.no_grad():
        held = (clipped > unclipped).to(dtype)
        # Ratios differ from 1 by 1e-4 or less: in float32, expm1(l) - l would be rounding noise.
        log_ratio64 = log_ratio.detach().double()
        approx_kl = (torch.expm1(log_ratio64) - log_ratio64).mean().to(dtype)
    return ClipLoss(
        loss=loss,
        ratio_BS=ratio.detach(),
        clip_fraction=held.mean(),
        clip_fraction_S=held.mean(dim=0),
        ratio_mean_S=ratio.detach().mean(dim=0),
        approx_kl=approx_kl,
    )
