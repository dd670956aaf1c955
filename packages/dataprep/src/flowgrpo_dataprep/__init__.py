"""Prompt data for text-to-image RL: prepare, curate, inspect, and the prompt source of a run.

`flowgrpo_dataprep.source` is what a run needs; it imports the standard library alone.
"""
