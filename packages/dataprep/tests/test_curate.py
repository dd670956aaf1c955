"""curate: duplicates and short prompts go, the split is a hash, the bytes never change."""

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flowgrpo_dataprep.cli import main
from flowgrpo_dataprep.curate import CurateConfig, curate
from flowgrpo_dataprep.errors import InputError
from flowgrpo_dataprep.source import PromptSource
from flowgrpo_dataprep.testing import write_tokenizer
from flowgrpo_dataprep.text import content_key, count_words, folded, id_key
from hypothesis import given, settings
from hypothesis import strategies as st


def line(prompt, sample_id, **fields):
    return json.dumps({"prompt": prompt, "metadata": {"task": "t2i", "sample_id": sample_id}} | fields)


def raw_file(tmp_path, lines, name="raw.jsonl"):
    path = tmp_path / name
    path.write_text("".join(text + "\n" for text in lines))
    return path


def curated(tmp_path, path, *, chunk_bytes=32 << 20, **settings):
    out = tmp_path / "out"
    report = curate(CurateConfig(inputs=(path,), out_dir=out, **settings), chunk_bytes=chunk_bytes)
    return report, {file.name: file.read_text().splitlines() for file in sorted(out.iterdir())}


def many(count):
    return [line(f"prompt number {k} of many, in some words", f"s{k}") for k in range(count)]


def test_the_first_of_equal_prompts_stays_and_its_line_keeps_its_bytes(tmp_path):
    lines = [
        '{"metadata":{"sample_id":"a","task":"t2i"},  "prompt":"\\u00e9t\\u00e9"}',
        line("été", "b"),
        line("Été", "c"),
    ]
    report, files = curated(tmp_path, raw_file(tmp_path, lines), eval_size=0)
    assert files["train.jsonl"] == [lines[0], lines[2]]  # letter case is a difference
    assert (report.read, report.duplicates, report.train) == (3, 1, 2)


def test_folded_duplicates_go_on_demand(tmp_path):
    lines = [line("A red  Panda", "a"), line("a red panda ", "b"), line("a red pandas", "c")]
    report, files = curated(tmp_path, raw_file(tmp_path, lines), eval_size=0, dedup="folded")
    assert (report.duplicates, files["train.jsonl"]) == (1, [lines[0], lines[2]])


def test_short_prompts_go(tmp_path):
    lines = [
        line("one two three", "a"),
        line("one two", "b"),
        line("\u7ea2\u718a\u732b", "c"),
        line("one  two\tthree", "d"),
    ]
    report, files = curated(tmp_path, raw_file(tmp_path, lines), eval_size=0, min_prompt_words=3)
    assert report.short == 1
    assert files["train.jsonl"] == [lines[0], lines[2], lines[3]]


def test_the_recipes_names_and_sizes(tmp_path):
    report, files = curated(
        tmp_path, raw_file(tmp_path, many(500)), prefix="pickapic_", eval_size=100, eval_subset_sizes=(8, 32)
    )
    sizes = {name: len(lines) for name, lines in files.items()}
    assert sizes == {
        "pickapic_train.jsonl": 400,
        "pickapic_eval.jsonl": 100,
        "pickapic_eval8.jsonl": 8,
        "pickapic_eval32.jsonl": 32,
    }
    small, middle, whole = (set(files[f"pickapic_eval{n}.jsonl"]) for n in ("8", "32", ""))
    assert small < middle < whole
    assert not whole & set(files["pickapic_train.jsonl"])
    assert (report.train, report.eval) == (400, 100)


def test_train_and_eval_keep_the_order_of_the_input(tmp_path):
    lines = many(300)
    _, files = curated(tmp_path, raw_file(tmp_path, lines), eval_size=50)
    for kept in files.values():
        assert kept == [text for text in lines if text in set(kept)]


def test_a_rerun_gives_the_same_bytes_however_the_work_is_cut(tmp_path, monkeypatch):
    path = raw_file(tmp_path, many(400) + many(50))
    whole = curated(tmp_path, path, eval_size=40, workers=1)
    cut = curated(tmp_path, path, eval_size=40, workers=1, chunk_bytes=3001)
    monkeypatch.setattr("flowgrpo_dataprep.curate.SMALL_BYTES", 0)  # as a large input: many buckets, on disk
    spread = curated(tmp_path, path, eval_size=40, workers=2, chunk_bytes=20_000)
    assert whole == cut == spread
    assert whole[0].duplicates == 50


def test_prompts_of_too_many_tokens_go_and_their_number_is_told(tmp_path, capsys):
    lines = [line("word " * 3, "a"), line("word " * 4, "b"), line("w" * 40, "c"), line("w x y z", "d")]
    path, tokenizer = raw_file(tmp_path, lines), write_tokenizer(tmp_path / "tokenizer")
    limit = {"max_prompt_tokens": 3, "tokenizer": tokenizer}
    report, files = curated(tmp_path, path, eval_size=0, **limit)
    assert (report.long, files["train.jsonl"]) == (2, [lines[0], lines[2]])
    cut, _ = curated(tmp_path, path, eval_size=0, chunk_bytes=60, workers=2, **limit)
    assert cut == report
    flags = ["--input", str(path), "--out-dir", str(tmp_path / "out"), "--eval-size", "0", "--quiet"]
    assert main(["curate", *flags, "--max-prompt-tokens", "3", "--tokenizer", str(tokenizer)]) == 0
    assert "long 2" in capsys.readouterr().out
    assert main(["curate", *flags, "--max-prompt-tokens", "3", "--tokenizer", str(tmp_path / "gone")]) == 2


def test_the_split_of_a_record_does_not_depend_on_the_others(tmp_path):
    small, large = raw_file(tmp_path, many(300), "small.jsonl"), raw_file(tmp_path, many(900), "large.jsonl")
    _, few = curated(tmp_path, small, eval_fraction=0.2)
    _, more = curated(tmp_path, large, eval_fraction=0.2)
    assert set(few["eval.jsonl"]) <= set(more["eval.jsonl"])
    assert set(few["train.jsonl"]) <= set(more["train.jsonl"])
    assert 120 < len(more["eval.jsonl"]) < 240  # 180 expected, standard deviation 12


def test_hashes_are_fixed_for_all_time():
    """A changed hash would move prompts between train and eval of existing runs."""
    assert content_key("a red panda").hex() == GOLDEN_CONTENT
    assert content_key("a red panda", ["b.png", "a.png"]) == content_key("a red panda", ["a.png", "b.png"])
    assert id_key("pickapic_0000001").hex() == GOLDEN_ID


GOLDEN_CONTENT = "f0dc29f8cfd68404d9bd5df455f67b14"
GOLDEN_ID = "cf80a11178ffb7113493e891aaa43702"


def test_records_without_their_media_go_unless_told_otherwise(tmp_path):
    (tmp_path / "there.png").write_bytes(b"")
    lines = [
        line("<image> one", "a", images=["there.png"]),
        line("<image> two", "b", image="gone.png"),
        line("three", "c", metadata={"task": "t2i", "sample_id": "c", "videos": ["gone.mp4"]}),
    ]
    path = raw_file(tmp_path, lines)
    report, files = curated(tmp_path, path, eval_size=0)
    assert (report.missing_media, files["train.jsonl"]) == (2, [lines[0]])
    report, files = curated(tmp_path, path, eval_size=0, check_media=False)
    assert (report.missing_media, files["train.jsonl"]) == (0, lines)


def test_one_prompt_with_other_media_is_another_record(tmp_path):
    lines = [line("x", "a", images=["1.png", "2.png"]), line("x", "b", images=["2.png", "1.png"]), line("x", "c")]
    report, files = curated(tmp_path, raw_file(tmp_path, lines), eval_size=0, check_media=False)
    assert (report.duplicates, files["train.jsonl"]) == (1, [lines[0], lines[2]])


def test_gzip_crlf_bom_and_blank_lines_do_not_change_the_output(tmp_path):
    lines = many(50)
    _, plain = curated(tmp_path, raw_file(tmp_path, lines), eval_size=5)
    path = tmp_path / "raw.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode()))
    _, packed = curated(tmp_path, path, eval_size=5)
    assert packed == plain


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 64])
def test_a_bad_line_stops_with_its_number_or_is_skipped(tmp_path, chunk_bytes):
    path = raw_file(tmp_path, [line("one", "a"), "", '{"prompt": "x"}', line("two", "b"), "nope", line("three", "c")])
    with pytest.raises(InputError) as error:
        curated(tmp_path, path, eval_size=0, chunk_bytes=chunk_bytes)
    assert (error.value.path, error.value.line) == (str(path), 3)
    report, files = curated(tmp_path, path, eval_size=0, on_error="skip", chunk_bytes=chunk_bytes)
    assert (report.read, report.skipped, len(files["train.jsonl"])) == (5, 2, 3)
    assert [text.split(", ")[1].split(":")[0] for text in report.first_skipped] == ["line 3", "line 5"]


def test_a_sample_id_used_for_two_prompts_is_refused_with_both_lines(tmp_path):
    path = raw_file(tmp_path, [line("one", "a"), line("two", "b"), line("three", "a")])
    with pytest.raises(InputError) as error:
        curated(tmp_path, path, eval_size=0)
    assert error.value.line == 3
    assert "line 1" in error.value.what
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [{"eval_size": 10}, {"eval_size": 11}, {"eval_fraction": 0.0, "eval_subset_sizes": (1,)}, {"min_prompt_words": 99}],
)
def test_too_few_prompts_are_told_and_nothing_is_written(tmp_path, settings):
    with pytest.raises(InputError):
        curated(tmp_path, raw_file(tmp_path, many(10)), **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_size": -1},
        {"eval_fraction": 1.0},
        {"eval_subset_sizes": (0,)},
        {"eval_size": 3, "eval_subset_sizes": (4,)},
        {"max_prompt_tokens": 507},
        {"max_prompt_tokens": 0, "tokenizer": Path("x")},
        {"tokenizer": Path("x")},
    ],
)
def test_settings_that_contradict_themselves_are_refused(tmp_path, settings):
    with pytest.raises(ValueError):
        curated(tmp_path, raw_file(tmp_path, many(10)), **settings)


def test_what_curate_writes_a_run_can_read(tmp_path):
    curated(tmp_path, raw_file(tmp_path, many(100)), eval_size=10)
    source = PromptSource(tmp_path / "out" / "train.jsonl", seed=0, batch_size=30)
    assert (len(source), source.batches_per_epoch) == (90, 3)


def test_memory_does_not_grow_with_the_input(tmp_path):
    """Peak of the process for 20 times the input; a table of the larger one alone would be 60 MB more."""
    text = "a prompt of some words, long enough to weigh something in memory, and then a bit longer than that " * 2
    peaks = []
    for count in (5_000, 100_000):
        path = tmp_path / f"{count}.jsonl"
        with open(path, "w") as file:
            file.writelines(line(f"{k} {text}", f"s{k}") + "\n" for k in range(count))
        code = (
            "import resource, sys; from pathlib import Path; from flowgrpo_dataprep.curate import *\n"
            "curate(CurateConfig(inputs=(Path(sys.argv[1]),), out_dir=Path(sys.argv[2]), eval_size=64, workers=1))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        command = [sys.executable, "-c", code, str(path), str(tmp_path / f"out{count}")]
        peaks.append(int(subprocess.check_output(command, text=True)) / 1024)
    assert peaks[1] - peaks[0] < 15, peaks


def test_the_command_does_what_the_recipe_says(tmp_path, capsys):
    raw = raw_file(tmp_path, many(60))
    flags = ["--out-dir", str(tmp_path / "o"), "--prefix", "p_", "--min-prompt-words", "6", "--eval-size", "20"]
    assert main(["curate", "--input", str(raw), *flags, "--eval-subset-sizes", "2", "4", "--no-check-media"]) == 0
    assert "train 40, eval 20" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [
        "p_eval.jsonl",
        "p_eval2.jsonl",
        "p_eval4.jsonl",
        "p_train.jsonl",
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["a b", "A b", "a  b", "c", "d e f", "\u00e9", "e\u0301"]), min_size=2, max_size=30))
def test_deduplication_equals_a_dict(tmp_path_factory, prompts):
    tmp_path = tmp_path_factory.mktemp("dedup")
    lines = [line(prompt, f"s{k}") for k, prompt in enumerate(prompts)]
    first = {}
    for prompt, text in zip(prompts, lines, strict=True):
        first.setdefault(prompt, text)
    _, files = curated(tmp_path, raw_file(tmp_path, lines), eval_size=0, chunk_bytes=700, workers=1)
    assert files["train.jsonl"] == list(first.values())


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", 0), ("one", 1), (" one  two\n", 2), ("\u4e00\u53ea\u732b", 3), ("a \u732b cat", 3), ("caf\u00e9 noir", 2)],
)
def test_words_are_counted_in_every_script(prompt, words):
    assert count_words(prompt) == words


def test_folding_ignores_case_white_space_and_width():
    assert folded("  A\tRed \uff30anda ") == folded("a red panda")
    assert folded("a red panda") != folded("a red pandas")


def test_a_full_disk_leaves_all_files_of_the_last_run_as_they_were(tmp_path, monkeypatch, capsys):
    _, before = curated(tmp_path, raw_file(tmp_path, many(60)), eval_size=20)
    synced = []

    def fsync(descriptor):
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "out"
    flags = ["--input", str(tmp_path / "raw.jsonl"), "--out-dir", str(out), "--eval-size", "5", "--quiet"]
    assert main(["curate", *flags]) == 2
    assert {file.name: file.read_text().splitlines() for file in sorted(out.iterdir())} == before
    said = capsys.readouterr().err
    assert said.startswith(f"dataprep: {out}: No space left on device")
    assert "Traceback" not in said


def test_two_outputs_of_one_file_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.jsonl").symlink_to("eval.jsonl")
    with pytest.raises(InputError) as error:
        curated(tmp_path, raw_file(tmp_path, many(10)), eval_size=2)
    assert "links to one" in error.value.what


def test_a_prompt_with_a_carriage_return_is_refused_with_its_line(tmp_path):
    with pytest.raises(InputError) as error:
        curated(tmp_path, raw_file(tmp_path, [line("one", "a"), line("a\rb", "b")]))
    assert (error.value.line, "carriage return" in error.value.what) == (2, True)
