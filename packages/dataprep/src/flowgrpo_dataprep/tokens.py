"""How many tokens a prompt has, by the tokenizer of a model folder. Imports the package tokenizers at first use.

Qwen-Image's text window holds TEXT_WINDOW tokens behind the beginning of its prompt template. The template's end takes
TEMPLATE_END_TOKENS of them, so a prompt may have 507: the engines refuse a longer one.
"""

import json
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flowgrpo_dataprep.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_WINDOW = 512
TEMPLATE_END_TOKENS = 5
"""`<|im_end|>`, a line break, `<|im_start|>`, `assistant`, a line break."""
CURATE_HINT = "`dataprep curate --max-prompt-tokens {most} --tokenizer FOLDER` drops them"
# Qwen2's, for folders that hold vocabulary and merges alone; a tokenizer.json says its own.
_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def most_tokens(prompt: str) -> int:
    """An upper bound: a token has at least one byte of UTF-8 (of composed characters, some of which are longer)."""
    return len(prompt) if prompt.isascii() else len(unicodedata.normalize("NFC", prompt).encode())


def count_tokens(prompt: str, tokenizer: Path) -> int:
    """Of the prompt alone. Raises InputError as `load_tokenizer`."""
    return len(load_tokenizer(tokenizer).encode(prompt, add_special_tokens=False).ids)


@lru_cache(maxsize=1)
def load_tokenizer(path: Path) -> "Tokenizer":
    """From a tokenizer.json, a folder that holds one, or a folder with Qwen2's vocab.json and merges.txt.

    Raises InputError: no such files, files that are none of a tokenizer, or the package tokenizers is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        what = "counting tokens needs the package tokenizers"
        raise InputError(str(path), 0, what, "pip install flowgrpo-dataprep[tokenizer]") from None
    whole = path / "tokenizer.json" if path.is_dir() else path
    parts = [path / name for name in ("vocab.json", "merges.txt")]
    try:
        if whole.is_file():
            return Tokenizer.from_file(str(whole))
        if all(part.is_file() for part in parts):
            return _qwen2(path)
    except Exception as error:  # tokenizers raises Exception itself
        raise InputError(str(path), 0, f"no tokenizer: {error}", "copy the model's tokenizer folder again") from error
    hint = "name the model's tokenizer folder: it holds tokenizer.json, or vocab.json and merges.txt"
    raise InputError(str(whole), 0, "no such file", hint)


def _qwen2(folder: Path) -> "Tokenizer":
    """As transformers' Qwen2Tokenizer makes it of these files."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.normalizers import NFC
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    tokenizer = Tokenizer(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.normalizer = NFC()
    pieces = Split(Regex(_QWEN2_PIECES), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = Sequence([pieces, ByteLevel(add_prefix_space=False, use_regex=False)])
    if (added := folder / "added_tokens.json").is_file():
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in json.loads(added.read_text())])
    return tokenizer
