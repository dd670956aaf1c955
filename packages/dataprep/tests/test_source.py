"""The prompt source of a run: the same prompts for the same rollout, and words for a file that no run can use."""

import gc
import json
import os
import pickle
import subprocess
import sys
from collections import Counter

import pytest
from flowgrpo_dataprep.source import Prompt, PromptFileError, PromptSource, validate_prompt_file


def line(prompt="a red panda", sample_id="a", **metadata):
    return json.dumps({"prompt": prompt, "metadata": {"task": "t2i", "sample_id": sample_id} | metadata})


@pytest.fixture
def prompts(tmp_path):
    """Ten prompts, p0 to p9."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(line(f"prompt {k}", f"p{k}", n=k) + "\n" for k in range(10)))
    return path


def ids(batch):
    return [prompt.sample_id for prompt in batch]


def test_a_resumed_run_draws_what_an_uninterrupted_one_would(prompts):
    whole = [ids(PromptSource(prompts, seed=1, batch_size=3).batch(k)) for k in range(9)]
    again = PromptSource(prompts, seed=1, batch_size=3)
    assert [ids(again.batch(k)) for k in (8, 2, 5)] == [whole[8], whole[2], whole[5]]


def test_the_order_of_a_seed_never_changes(prompts):
    """Fixed values: a run started with an older version must resume on the same prompts."""
    source = PromptSource(prompts, seed=1234, batch_size=4)
    assert [ids(source.batch(k)) for k in range(3)] == GOLDEN


GOLDEN = [["p6", "p3", "p8", "p4"], ["p2", "p7", "p1", "p9"], ["p6", "p1", "p8", "p3"]]


def test_an_epoch_has_each_prompt_at_most_once_and_leaves_out_fewer_than_a_batch(prompts):
    source = PromptSource(prompts, seed=0, batch_size=3)
    assert source.batches_per_epoch == 3
    for epoch in range(4):
        drawn = [i for k in range(3) for i in ids(source.batch(3 * epoch + k))]
        assert len(set(drawn)) == 9


def test_over_many_epochs_every_prompt_comes_equally_often(prompts):
    source = PromptSource(prompts, seed=0, batch_size=3)
    counts = Counter(i for k in range(900) for i in ids(source.batch(k)))
    assert len(counts) == 10
    assert max(counts.values()) - min(counts.values()) < 40  # 270 each; standard deviation about 5


def test_seeds_and_epochs_have_their_own_order(prompts):
    orders = [ids(PromptSource(prompts, seed=s, batch_size=10).batch(e)) for s in range(3) for e in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_a_prompt_carries_its_metadata(prompts):
    assert next(PromptSource(prompts, seed=0, batch_size=1).all()) == Prompt(
        "prompt 0", "p0", {"task": "t2i", "sample_id": "p0", "n": 0}
    )


def test_evaluation_reads_all_prompts_in_file_order(prompts):
    assert ids(PromptSource(prompts, seed=3, batch_size=4).all()) == [f"p{k}" for k in range(10)]


def test_blank_lines_and_crlf_and_a_missing_last_newline_do_not_matter(tmp_path, prompts):
    other = tmp_path / "other.jsonl"
    other.write_bytes(b"\r\n\n" + prompts.read_bytes().rstrip().replace(b"\n", b"\r\n\r\n"))
    assert [p.prompt for p in PromptSource(other, seed=5, batch_size=2).batch(7)] == [
        p.prompt for p in PromptSource(prompts, seed=5, batch_size=2).batch(7)
    ]


def test_other_prompts_have_another_fingerprint(tmp_path, prompts):
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text().replace("prompt 3", "prompt three"))
    one, two = (PromptSource(path, seed=0, batch_size=1).fingerprint for path in (prompts, other))
    assert one != two


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("{", "line 1: not JSON"),
        (line() + "\nnot json\n", "line 2: not JSON"),
        ("[1]", "a JSON list"),
        ('{"metadata": {}}', "no `prompt`"),
        ('{"prompt": 3}', "`prompt` is 3"),
        ('{"prompt": " "}', "blank"),
        ('{"prompt": "x"}', "metadata"),
        (line(task="t2v"), "'t2v'"),
        ('{"prompt": "x", "metadata": {}}', "metadata.task is None"),
        (line(sample_id=7), "sample_id is 7"),
        (line(sample_id="a") + "\n\n" + line("other", sample_id="a"), "line 3: metadata.sample_id 'a' was already"),
        ('{"prompt": "\\ud800", "metadata": {"task": "t2i"}}', "surrogate"),
        ('{"prompt": ' + "[" * 100_000, "line 1"),
        (line("one") + "\n" + line("a \0 b", "b"), "line 2: `prompt` holds a NUL"),
        (line("a \r\n b"), "line 1: `prompt` holds a carriage return"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError) as error:
        PromptSource(path, seed=0, batch_size=1)
    assert said in error.value.problems[0]
    assert validate_prompt_file(path) == list(error.value.problems)
    assert pickle.loads(pickle.dumps(error.value)).problems == error.value.problems


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line().encode() + b'\n{"prompt": "\xff\xfe"}\n')
    (problem,) = validate_prompt_file(path)
    assert problem.startswith("line 2: not UTF-8")


def test_every_problem_is_told_at_once(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("x\n" * 12 + line() + "\n")
    assert len(validate_prompt_file(path)) == 12


def test_a_missing_file_is_told_in_words(tmp_path):
    (problem,) = validate_prompt_file(tmp_path / "nowhere.jsonl")
    assert "no such file" in problem


def test_preflight_can_bound_its_reading(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(line() + "\n" + "bad\n" * 5)
    assert len(validate_prompt_file(path, max_lines=3)) == 2


def test_fewer_prompts_than_a_batch_are_refused(prompts):
    with pytest.raises(PromptFileError) as error:
        PromptSource(prompts, seed=0, batch_size=11)
    assert "10 prompts" in error.value.problems[0]


def test_a_negative_rollout_is_refused(prompts):
    with pytest.raises(ValueError):
        PromptSource(prompts, seed=0, batch_size=1).batch(-1)


def test_a_file_put_in_its_place_does_not_reach_a_running_source(tmp_path, prompts):
    source = PromptSource(prompts, seed=1, batch_size=3)
    before = [source.batch(k) for k in range(3)]
    other = tmp_path / "other.jsonl"
    other.write_text(line("another", "x"))
    other.rename(prompts)  # as `dataprep curate` does
    assert [source.batch(k) for k in range(3)] == before
    prompts.unlink()
    assert [source.batch(k) for k in range(3)] == before


def rewritten(path, text):
    """Changed in its place, a second later."""
    path.write_text(text)
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


@pytest.mark.parametrize("old_new", [("prompt 3", "prompt X"), ("prompt 3", "a longer prompt"), ('"p9"', '"q9"')])
def test_a_file_changed_in_its_place_is_refused_and_never_gives_other_prompts(prompts, old_new):
    source = PromptSource(prompts, seed=1, batch_size=3)
    source.batch(0)
    rewritten(prompts, prompts.read_text().replace(*old_new))
    for read in (lambda: source.batch(0), lambda: next(source.all())):
        with pytest.raises(PromptFileError) as error:
            read()
        assert "was changed" in error.value.problems[0]


def test_a_file_written_again_with_the_same_bytes_is_no_change(prompts):
    source = PromptSource(prompts, seed=1, batch_size=3)
    before = source.batch(5)
    rewritten(prompts, prompts.read_text())
    assert source.batch(5) == before


def test_a_source_can_be_sent_to_another_process_which_checks_the_file_it_finds(prompts):
    source = PromptSource(prompts, seed=1, batch_size=3)
    sent = pickle.dumps(source)
    assert pickle.loads(sent).batch(7) == source.batch(7)
    rewritten(prompts, prompts.read_text().replace("prompt 3", "prompt X"))
    with pytest.raises(PromptFileError):
        pickle.loads(sent)
    prompts.unlink()
    with pytest.raises(PromptFileError):
        pickle.loads(sent)


def test_a_source_closes_its_file(prompts):
    source = PromptSource(prompts, seed=1, batch_size=3)
    descriptor = source._descriptor
    assert os.path.samestat(os.fstat(descriptor), prompts.stat())
    del source
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_the_source_imports_the_standard_library_alone():
    code = (
        "import sys, flowgrpo_dataprep.source; print({'numpy', 'polars', 'orjson', 'torch'} & set(sys.modules) or [])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
