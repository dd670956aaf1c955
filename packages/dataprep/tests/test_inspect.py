"""inspect: everything about the files at once, and an exit code that a script can trust."""

import json

import pytest
from flowgrpo_dataprep.cli import main
from flowgrpo_dataprep.errors import InputError
from flowgrpo_dataprep.inspection import InspectConfig, as_text, inspect
from flowgrpo_dataprep.testing import write_records, write_tokenizer
from flowgrpo_dataprep.tokens import count_tokens, load_tokenizer, most_tokens
from PIL import Image


def test_a_good_pair_of_files_has_no_finding(tmp_path):
    train = write_records(tmp_path / "train.jsonl", [f"a prompt that has number {k}" for k in range(20)], prefix="t")
    evaluation = write_records(
        tmp_path / "eval.jsonl", [f"another prompt with the number {k}" for k in range(5)], prefix="e"
    )
    report = inspect(InspectConfig(train=train, eval=evaluation))
    assert (report.problems, report.warnings) == ([], [])
    assert report.files["train"].records == 20
    assert main(["inspect", "--train", str(train), "--eval", str(evaluation), "--quiet"]) == 0


@pytest.mark.parametrize("small", [0, 8 << 20])
def test_exact_leakage_is_a_problem_and_near_leakage_a_warning(tmp_path, monkeypatch, small):
    monkeypatch.setattr("flowgrpo_dataprep.inspection.SMALL_BYTES", small)
    train = write_records(
        tmp_path / "t.jsonl", ["a red panda in a big teacup", "two cups on a wooden table"], prefix="t"
    )
    evaluation = write_records(
        tmp_path / "e.jsonl",
        ["Two  Cups on a wooden table", "a red panda in a big teacup", "a new one in six words"],
        prefix="e",
    )
    report = inspect(InspectConfig(train=train, eval=evaluation))
    assert (report.leaked, report.leaked_lines) == (1, [(1, 2)])
    assert (report.near_leaked, report.near_leaked_lines) == (1, [(2, 1)])
    assert len(report.problems) == len(report.warnings) == 1


def test_a_sample_id_on_both_sides_is_a_problem(tmp_path):
    train = write_records(tmp_path / "t.jsonl", ["one prompt of six words here"], prefix="s")
    evaluation = write_records(tmp_path / "e.jsonl", ["another prompt of six words here"], prefix="s")
    report = inspect(InspectConfig(train=train, eval=evaluation))
    assert report.shared_ids == 1
    assert report.leaked == 0
    assert len(report.problems) == 1


def test_duplicates_are_told_apart_from_folded_ones(tmp_path):
    prompts = ["a b c d e f", "A b c d e f", "a b c d e f", "x y z x y z", "a b  c d e f"]
    report = inspect(InspectConfig(train=write_records(tmp_path / "t.jsonl", prompts)))
    file = report.files["train"]
    assert (file.duplicates, file.duplicate_lines) == (1, [(1, 3)])
    assert (file.folded_duplicates, file.folded_lines) == (2, [(1, 2), (1, 5)])
    assert report.problems == []


def test_bad_lines_and_repeated_ids_are_problems_with_their_lines(tmp_path):
    path = write_records(tmp_path / "t.jsonl", ["one prompt of six words here"] * 1)
    with open(path, "a") as file:
        file.write("nope\n" + path.read_text().replace("one", "two") + '{"prompt": "x", "metadata": {"task": "t2v"}}\n')
    file = inspect(InspectConfig(train=path)).files["train"]
    assert (file.records, file.bad, file.repeated_id_lines) == (4, 2, [(1, 3)])
    assert [text.split(":")[0] for text in file.bad_lines] == ["line 2", "line 4"]
    assert main(["inspect", "--train", str(path), "--quiet"]) == 1


def test_placeholders_must_match_media_and_media_must_decode(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])
    rows = [
        {"prompt": "<image> shows a cat", "images": ["good.png"]},
        {"prompt": "<image> and <image> show cats", "images": ["good.png"]},
        {"prompt": "no picture here", "images": ["good.png"]},
        {"prompt": "<video> of a cat"},
        {"prompt": "<image> is not there", "images": ["gone.png"]},
        {"prompt": "<image> is broken", "images": ["cut.png"]},
    ]
    path = tmp_path / "t.jsonl"
    metadata = [{"metadata": {"task": "t2i", "sample_id": f"s{k}"}} for k in range(len(rows))]
    path.write_text("".join(json.dumps(row | extra) + "\n" for row, extra in zip(rows, metadata, strict=True)))
    lines = [text.split(":")[0] for text in inspect(InspectConfig(train=path)).files["train"].bad_media_lines]
    assert lines == ["line 2", "line 3", "line 4", "line 5"]
    assert inspect(InspectConfig(train=path, decode_media=True)).files["train"].bad_media == 5


def test_lengths_are_held_against_the_text_window(tmp_path):
    path = write_records(tmp_path / "t.jsonl", ["word " * 8, "word " * 200, "\u732b" * 180])
    file = inspect(InspectConfig(train=path, text_window=512)).files["train"]
    assert file.length_unit == "bytes"
    assert file.past_window == 2  # 1,000 bytes, and 180 characters of 3 bytes
    assert file.longest == 1000
    assert sum(file.lengths) == 3


@pytest.mark.parametrize(("words", "refused"), [(200, False), (201, True)])
def test_a_prompt_that_leaves_no_room_for_the_templates_end_is_a_problem(tmp_path, words, refused):
    path = write_records(tmp_path / "t.jsonl", ["word " * 8, "word " * words])
    config = InspectConfig(train=path, text_window=205, tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    report = inspect(config)
    file = report.files["train"]
    assert (file.length_unit, file.longest) == ("tokens", words)
    assert (file.past_window, file.past_window_lines) == ((1, [2]) if refused else (0, []))
    assert [f"--max-prompt-tokens {200}" in problem for problem in report.problems] == [True] * refused


def test_qwens_vocabulary_and_merges_count_as_its_tokenizer_json(tmp_path):
    """Qwen-Image's own folder has no tokenizer.json."""
    from tokenizers import pre_tokenizers

    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "re", "\u0120re", "\u0120red"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: k for k, token in enumerate(vocabulary)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nr e\n\u0120 re\n\u0120re d\n")
    (tmp_path / "added_tokens.json").write_text('{"<|im_end|>": 300}')
    counts = {"red": 2, "red red": 3, "a red<|im_end|>": 3, "\u732b": 3, "\u0958": 6, "12\n": 3}
    assert {prompt: count_tokens(prompt, tmp_path) for prompt in counts} == counts
    assert all(count <= most_tokens(prompt) for prompt, count in counts.items())


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer.json": "{"}, {"vocab.json": "{}"}, {"vocab.json": "", "merges.txt": ""}]
)
def test_a_folder_that_holds_no_tokenizer_is_named(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in error.value.path


def test_short_prompts_are_counted(tmp_path):
    path = write_records(tmp_path / "t.jsonl", ["a cat", "one prompt of six words here"])
    report = inspect(InspectConfig(train=path))
    assert report.files["train"].short == 1
    assert "50.0%" in report.warnings[0]


def test_an_empty_file_is_a_problem(tmp_path):
    (tmp_path / "t.jsonl").write_text("\n")
    report = inspect(InspectConfig(train=tmp_path / "t.jsonl"))
    assert len(report.problems) == 1
    assert "1 problem(s)" in as_text(report)


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--strict"], 1)])
def test_strict_makes_warnings_count(tmp_path, flags, code):
    path = write_records(tmp_path / "t.jsonl", ["a cat"])
    assert main(["inspect", "--train", str(path), "--quiet", *flags]) == code


def test_the_report_comes_as_json(tmp_path, capsys):
    path = write_records(tmp_path / "t.jsonl", ["one prompt of six words here"])
    main(["inspect", "--train", str(path), "--json", "--quiet"])
    assert json.loads(capsys.readouterr().out)["files"]["train"]["records"] == 1


def test_without_a_file_the_command_says_what_it_needs(tmp_path, capsys):
    assert main(["inspect"]) == 2
    assert main(["inspect", "--train", str(tmp_path / "gone.jsonl")]) == 2
    assert "gone.jsonl" in capsys.readouterr().err
