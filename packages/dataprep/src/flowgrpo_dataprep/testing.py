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


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are the words between white space. Needs the package tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
