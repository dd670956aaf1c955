"""Every formula of FlowGRPO, in torch: schedule, trained steps, SDE transition, log-prob, advantage, clipped loss.

Import names from here or from the module that defines them. Importing this package imports no torch and no
numpy, so that settings can be checked in milliseconds. Read in this order: `sigmas`, `sde_steps`, `transition`,
`advantage`, `loss`; `kernels` holds the Triton versions of `transition`'s log-prob and sampling step.

One name stays in its module, which is called the same: `from flowgrpo_math.transition import transition`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgrpo_math.advantage import NonFiniteRewardError, combine_component_advantages, normalize_grouped
    from flowgrpo_math.loss import ClipLoss, grpo_clip_loss
    from flowgrpo_math.sde_steps import reachable_sde_indices, resolve_sde_indices
    from flowgrpo_math.sigmas import qwen_image_sigmas
    from flowgrpo_math.transition import (
        SdeType,
        Transition,
        dance_sde_transition_std_dev_t,
        flow_sde_log_prob,
        flow_sde_transition_moments,
        flow_sde_transition_std,
        flow_sde_transition_std_dev_t,
        replay_transition_logp,
        transition_logp,
        transition_mean,
        transition_sample,
    )

_NAMES_OF_MODULE = {
    "sigmas": ("qwen_image_sigmas",),
    "sde_steps": ("resolve_sde_indices", "reachable_sde_indices"),
    "transition": (
        "SdeType",
        "Transition",
        "transition_mean",
        "transition_sample",
        "transition_logp",
        "flow_sde_transition_std_dev_t",
        "dance_sde_transition_std_dev_t",
        "flow_sde_transition_std",
        "flow_sde_transition_moments",
        "flow_sde_log_prob",
        "replay_transition_logp",
    ),
    "advantage": ("normalize_grouped", "combine_component_advantages", "NonFiniteRewardError"),
    "loss": ("grpo_clip_loss", "ClipLoss"),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

__all__ = [  # noqa: RUF022  (reading order)
    "qwen_image_sigmas",
    "resolve_sde_indices",
    "reachable_sde_indices",
    "SdeType",
    "Transition",
    "transition_mean",
    "transition_sample",
    "transition_logp",
    "flow_sde_transition_std_dev_t",
    "dance_sde_transition_std_dev_t",
    "flow_sde_transition_std",
    "flow_sde_transition_moments",
    "flow_sde_log_prob",
    "replay_transition_logp",
    "normalize_grouped",
    "combine_component_advantages",
    "NonFiniteRewardError",
    "grpo_clip_loss",
    "ClipLoss",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
