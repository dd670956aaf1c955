"""Prompt data for text-to-image RL: prepare, curate, inspect, and the prompt source of a run."""
