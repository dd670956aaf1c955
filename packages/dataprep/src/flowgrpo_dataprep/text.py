"""What a prompt is as text: its words, its folded form, and the keys that tell prompts apart."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable

# Han, kana and their extensions are written without spaces: each such character counts as a word.
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


def count_words(prompt: str) -> int:
    """Words between white space; in Chinese and Japanese, characters."""
    if prompt.isascii():
        return len(prompt.split())
    return len(_UNSPACED.sub(" x ", prompt).split())


def folded(prompt: str) -> str:
    """The prompt without what the eye skips: letter case, runs of white space, compatibility forms (NFKC)."""
    if not prompt.isascii():
        prompt = unicodedata.normalize("NFKC", prompt)
    return " ".join(prompt.casefold().split())


def content_key(prompt: str, media: Iterable[str] = ()) -> bytes:
    """16 bytes, BLAKE2b of the prompt and its sorted media paths: the same on every machine and in every version."""
    text = prompt if not media else "\0".join([prompt, *sorted(media)])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def id_key(sample_id: str) -> bytes:
    """16 bytes, BLAKE2b of a sample_id; its first 8 order the split into train and eval."""
    return hashlib.blake2b(sample_id.encode(), digest_size=16, person=b"split").digest()
