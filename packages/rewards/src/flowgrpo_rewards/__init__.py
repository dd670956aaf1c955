"""Reward scorers for text-to-image RL, where they run, and the reward step."""
