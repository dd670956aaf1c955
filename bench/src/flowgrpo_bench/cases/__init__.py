"""One file a case; `flowgrpo_bench.case` says what it defines, `clip_loss.py` is the shortest example."""
