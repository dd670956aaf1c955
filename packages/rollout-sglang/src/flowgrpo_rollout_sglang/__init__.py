"""Rollout engines for flow-matching image models: sampling, trajectories, artifacts, verified weight sync.

Importing this package imports no torch: settings (`config`) are read by preflight, which must answer in
half a second. Read in this order: `config`, `request`, `engine`, `diffusers_engine`, `sidecar`, `wire`.
"""
