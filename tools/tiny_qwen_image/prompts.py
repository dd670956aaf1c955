"""Writes the prompt files of the tiny model: 88 captions to train on and 32 others to evaluate on.

python prompts.py FOLDER
"""

import json
import sys
from pathlib import Path

import numpy as np
from flowgrpo_rewards.shapes import all_specs

EVAL_PROMPTS = 32
SPLIT_SEED = 20261129


def main(folder: Path) -> None:
    captions = [spec.caption for spec in all_specs()]
    held_out = set(np.random.default_rng(SPLIT_SEED).permutation(len(captions))[:EVAL_PROMPTS].tolist())
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in (("train", False), ("eval", True)):
        lines = [
            json.dumps({"prompt": caption, "metadata": {"task": "t2i", "sample_id": f"shapes_{i:04d}"}})
            for i, caption in enumerate(captions)
            if (i in held_out) is wanted
        ]
        (folder / f"shapes_{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
