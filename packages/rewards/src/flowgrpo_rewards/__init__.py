"""Reward scorers for text-to-image RL, where they run, and the reward step.

Importing this package imports no torch, numpy or PIL. Read in this order: `protocol`, `config`, `loading`,
`post_process`, then a scorer (`pickscore`), `server` and `remote`.
"""

from flowgrpo_rewards.config import RewardConfig
from flowgrpo_rewards.loading import load_scorer

# `flowgrpo_rewards.post_process` names the function, for --custom-reward-post-process-path; the module of the
# same name stays importable with `from flowgrpo_rewards.post_process import ...`.
from flowgrpo_rewards.post_process import RewardReport, post_process
from flowgrpo_rewards.protocol import GenerativeRewardScorer, Invalid, RewardError, RewardSample, Value

__all__ = [
    "GenerativeRewardScorer",
    "Invalid",
    "RewardConfig",
    "RewardError",
    "RewardReport",
    "RewardSample",
    "Value",
    "load_scorer",
    "post_process",
]
