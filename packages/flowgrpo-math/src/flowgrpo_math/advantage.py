"""Advantages: rewards centred inside their prompt group and, if wanted, divided by a standard deviation.

Shapes: G prompt groups, N candidates of a group.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from flowgrpo_math._checks import require_floating

StdMode = Literal["group", "batch", "none"]


class NonFiniteRewardError(ValueError):
    """A scorer returned NaN or infinity. Training on it would poison the policy in one step."""

    def __init__(self, component: str, group: int, candidate: int, value: float):
        super().__init__(component, group, candidate, value)  # pickle, and so Ray, rebuilds from these
        self.component, self.group, self.candidate, self.value = component, group, candidate, value

    def __str__(self) -> str:
        return (
            f"reward component {self.component!r} is {self.value} for candidate {self.candidate} "
            f"of group {self.group}; every reward must be finite: mend the scorer, or give such an image "
            "a reward of its own"
        )


def normalize_grouped(rewards_GN: Tensor, std_mode: StdMode = "group", eps: float = 1e-6) -> Tensor:
    """Advantages of one reward: [G, N], float32 (float64 if the rewards are).

        centred = r - mean of its group
        group   centred / (std of the group + eps)          GRPO, https://arxiv.org/abs/2402.03300
        batch   centred / (std of all rewards + eps)        Flow-GRPO's global std, arXiv 2505.05470
        none    centred                                     Dr.GRPO, https://arxiv.org/abs/2503.20783

    The standard deviations are the unbiased ones (divisor n - 1), as in text GRPO. Each group sums to zero;
    a group of equal rewards gives exact zeros. Computed in float64.

    Args:
        rewards_GN: [G, N], floating point and finite.
        eps: at least 0; keeps the divisor away from 0.

    Raises:
        NonFiniteRewardError: a NaN or infinite reward.
        ValueError: another shape, an unknown mode, eps < 0, or N = 1 with `group` or `batch`: a group of one
            has no spread and its centred reward is 0, so use `none`, as `combine_component_advantages` does.
        TypeError: integer rewards.
    """
    return _normalize("reward", rewards_GN, std_mode, eps)


def combine_component_advantages(
    components: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    applies: Mapping[str, Sequence[bool]] | None = None,
    std_mode: StdMode = "group",
    eps: float = 1e-6,
) -> Tensor:
    """One advantage per candidate from several rewards, sum over c of weight_c * normalize_grouped(r_c): [G, N].

    Each component is normalized by itself, so that weights compare components, not their scales.
    One candidate per prompt (N = 1) forces std_mode `none`, and all advantages are then 0.

    Args:
        components: name -> rewards [G, N], all of one shape.
        weights: name -> weight, finite, for exactly the same names.
        applies: name -> [G] whether the component judges the group; None: each judges all. What the rows of other
            groups hold is never read: they do not count in a standard deviation, and add 0.

    Raises:
        ValueError: no component, names that differ, a weight that is not finite, shapes that differ; and the
            errors of `normalize_grouped`, with the component's name.
    """
    if not components:
        raise ValueError("no reward component was given; at least one is needed to make an advantage")
    if components.keys() != weights.keys():
        without_weight = sorted(components.keys() - weights.keys())
        without_reward = sorted(weights.keys() - components.keys())
        raise ValueError(
            f"components without a weight: {without_weight}; weights without a component: {without_reward}; "
            "give each component one weight (0 leaves it out of the sum)"
        )
    if applies is not None and (unsaid := components.keys() - applies.keys()):
        raise ValueError(f"applies does not say which groups {sorted(unsaid)} judge(s); give one entry for each group")
    total: Tensor | None = None
    for name, rewards_GN in components.items():
        weight = float(weights[name])
        if not abs(weight) < float("inf"):
            raise ValueError(f"the weight of component {name!r} is {weight}; it must be finite")
        if total is not None and rewards_GN.shape != total.shape:
            raise ValueError(
                f"component {name!r} has shape {list(rewards_GN.shape)}, those before it {list(total.shape)}; "
                "all components score the same candidates"
            )
        single = rewards_GN.ndim == 2 and rewards_GN.shape[1] == 1
        mode = "none" if single else std_mode
        weighted = weight * _normalize_where(name, rewards_GN, applies and applies[name], mode, eps)
        total = weighted if total is None else total + weighted
    assert total is not None
    return total


def _normalize_where(
    name: str, rewards_GN: Tensor, applies: Sequence[bool] | None, std_mode: StdMode, eps: float
) -> Tensor:
    """`_normalize` of the groups that `applies` names (None: all); 0 for the others."""
    if applies is None:
        return _normalize(name, rewards_GN, std_mode, eps)
    judged_G = torch.tensor(list(applies), dtype=torch.bool, device=rewards_GN.device)
    if judged_G.shape != rewards_GN.shape[:1]:
        raise ValueError(
            f"applies of component {name!r} has {len(judged_G)} entries for rewards of shape {list(rewards_GN.shape)}; "
            "give one for each group"
        )
    result = torch.zeros_like(rewards_GN)
    if judged_G.any():
        normal = _normalize(name, rewards_GN[judged_G], std_mode, eps)
        result = result.to(normal.dtype)
        result[judged_G] = normal
    return result


def _normalize(name: str, rewards_GN: Tensor, std_mode: StdMode, eps: float) -> Tensor:
    require_floating(**{f"rewards of {name}": rewards_GN})
    if rewards_GN.ndim != 2 or rewards_GN.numel() == 0:
        raise ValueError(f"rewards of {name!r} have shape {list(rewards_GN.shape)}; they must be [groups, candidates]")
    if std_mode not in get_args(StdMode):
        raise ValueError(f"std_mode = {std_mode!r}; it must be one of {', '.join(get_args(StdMode))}")
    if not eps >= 0.0:
        raise ValueError(f"eps = {eps}; it must be at least 0")
    _check_rewards_finite(name, rewards_GN)
    if rewards_GN.shape[1] == 1 and std_mode != "none":
        raise ValueError(
            f"rewards of {name!r} hold one candidate per group, which has no spread to divide by (std_mode = "
            f'{std_mode!r}); draw more candidates per prompt, or use std_mode="none"'
        )
    rewards = rewards_GN.detach().double()
    equal_G1 = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    centred = (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(equal_G1, 0.0)
    if std_mode == "group":
        # Where all rewards are equal the numerator is 0, and any divisor but 0 will do.
        centred = centred / (rewards.std(dim=1, keepdim=True) + eps).masked_fill(equal_G1, 1.0)
    elif std_mode == "batch":
        spread = rewards.std() + eps
        centred = centred / torch.where(spread > 0.0, spread, torch.ones_like(spread))
    return centred.to(torch.float64 if rewards_GN.dtype == torch.float64 else torch.float32)


def _check_rewards_finite(name: str, rewards_GN: Tensor) -> None:
    bad = (~torch.isfinite(rewards_GN)).nonzero()
    if len(bad):
        group, candidate = bad[0].tolist()
        raise NonFiniteRewardError(name, group, candidate, rewards_GN[group, candidate].item())
