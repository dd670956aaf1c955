"""Which prompts are too long for an engine, found before a run starts."""

import pickle
from pathlib import Path

import pytest
from flowgrpo_rollout_sglang.text_window import (
    MAX_PROMPT_TOKENS,
    PromptsTooLongError,
    check_prompts,
    prompts_over_window,
)

MODEL = Path(__file__).parents[3] / "apps/trainer/src/flowgrpo_trainer/assets/tiny-qwen-image"
WHOLE = "a" + " red" * (MAX_PROMPT_TOKENS - 1)  # a token each
LONGER = WHOLE + " red"
COMPOSED_LONGER = "\u0958" * 169  # 507 bytes; the tokenizer writes each as two characters, 6 bytes


def test_a_prompt_of_507_tokens_passes_and_one_of_508_is_named_by_its_line():
    assert prompts_over_window(["a circle", LONGER, WHOLE, LONGER], MODEL) == {2: 508, 4: 508}


def test_a_prompt_that_the_tokenizer_makes_longer_than_its_bytes_is_found():
    assert list(prompts_over_window([COMPOSED_LONGER], MODEL)) == [1]


def test_no_tokenizer_is_loaded_where_every_prompt_has_few_bytes():
    assert prompts_over_window(["red", "r" * MAX_PROMPT_TOKENS, "\u732b" * 169], "/nowhere") == {}


def test_the_error_before_a_run_names_the_list_the_prompts_and_the_command():
    check_prompts("train.jsonl", [WHOLE], MODEL)
    with pytest.raises(PromptsTooLongError) as error:
        check_prompts("train.jsonl", ["a circle", *[LONGER] * 12], MODEL)
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.source, list(again.tokens)) == ("train.jsonl", list(range(2, 14)))
    assert all(
        words in str(again) for words in ("train.jsonl", "prompt 2 has 508", "2 more", "--max-prompt-tokens 507")
    )
