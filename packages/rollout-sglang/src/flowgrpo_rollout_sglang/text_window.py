"""Qwen-Image's text window: how many tokens a prompt may have, and which prompts of a list have more.

Used by both engines, which refuse such a prompt, and before a run, which would end at it. Imports transformers only
where a prompt is so long that it must be counted.
"""

import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MAX_TEXT_TOKENS = 512
"""What the engines take after the template's beginning: a prompt's tokens, and those of the template's end."""
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_BEGINS, TEMPLATE_ENDS = 34, 5
"""Tokens of the template before the prompt, whose hidden states are dropped, and behind it."""
MAX_PROMPT_TOKENS = MAX_TEXT_TOKENS - TEMPLATE_ENDS
LONG_PROMPT_HINT = (
    f"shorten it, or drop such prompts: dataprep curate --max-prompt-tokens {MAX_PROMPT_TOKENS} "
    "--tokenizer <model folder>/tokenizer"
)


class PromptsTooLongError(ValueError):
    """A list of prompts of which some are longer than an engine takes: the list, and each one's number and tokens."""

    SHOWN = 10

    def __init__(self, source: str, tokens: dict[int, int]):
        super().__init__(source, tokens)  # pickle rebuilds from these
        self.source, self.tokens = source, tokens

    def __str__(self) -> str:
        shown = ", ".join(f"prompt {n} has {count}" for n, count in list(self.tokens.items())[: self.SHOWN])
        more = len(self.tokens) - self.SHOWN
        return (
            f"{self.source}: {len(self.tokens)} prompt(s) have more than the {MAX_PROMPT_TOKENS} tokens that an engine "
            f"takes: {shown}" + (f", and {more} more" if more > 0 else "") + f"\nhint: {LONG_PROMPT_HINT}"
        )


def check_prompts(source: str, prompts: Iterable[str], model_path: str | Path) -> None:
    """Raises PromptsTooLongError, with the name `source`, if an engine would refuse one of `prompts`.

    A run draws most prompts late: without this it would end in mid-flight, and again whenever it is resumed.
    """
    if found := prompts_over_window(prompts, model_path):
        raise PromptsTooLongError(source, found)


def prompts_over_window(prompts: Iterable[str], model_path: str | Path) -> dict[int, int]:
    """The prompts that are too long: number in the list, from 1 as lines are, to tokens (those of the prompt alone).

    A token has at least one byte, so that only prompts of more than MAX_PROMPT_TOKENS bytes are counted. Raises
    OSError or ValueError where there is one, and the model folder has no tokenizer.
    """
    tokenizer, found = None, {}
    for number, prompt in enumerate(prompts, start=1):
        if _bytes(prompt) > MAX_PROMPT_TOKENS:
            tokenizer = tokenizer or _tokenizer(Path(model_path))
            if (tokens := text_tokens(tokenizer, prompt)) > MAX_TEXT_TOKENS:
                found[number] = tokens - TEMPLATE_ENDS
    return found


def text_tokens(tokenizer: Callable[[str], Any], prompt: str) -> int:
    """What a prompt takes of MAX_TEXT_TOKENS, by a tokenizer of transformers."""
    return len(tokenizer(TEMPLATE.format(prompt)).input_ids) - TEMPLATE_BEGINS


def too_long(tokens: int, prompt: str) -> str:
    """What is wrong with a prompt that takes `tokens` of the window."""
    return (
        f"a prompt of {tokens - TEMPLATE_ENDS} tokens, at most {MAX_PROMPT_TOKENS} fit (the window has "
        f"{MAX_TEXT_TOKENS}, the template's end takes {TEMPLATE_ENDS}): {prompt[:80]!r}"
    )


def _bytes(prompt: str) -> int:
    """Of UTF-8, as the tokenizer sees the prompt: it composes characters first, which makes some of them longer."""
    return len(prompt) if prompt.isascii() else len(unicodedata.normalize("NFC", prompt).encode())


def _tokenizer(model_path: Path) -> Callable[[str], Any]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path / "tokenizer")
