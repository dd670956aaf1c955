"""For tests of this package and of its users."""

import json
from collections.abc import Sequence
from pathlib import Path


def write_records(path: Path, prompts: Sequence[str], *, prefix: str = "s") -> Path:
    """A prompt file: `prompts` with the sample_ids `<prefix>0`, `<prefix>1`, ..."""
    lines = [
        json.dumps({"prompt": prompt, "metadata": {"task": "t2i", "sample_id": f"{prefix}{k}"}}, ensure_ascii=False)
        for k, prompt in enumerate(prompts)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path
