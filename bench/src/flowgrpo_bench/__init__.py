"""Performance cases of flowgrpo with correctness gates, baselines and compare."""
