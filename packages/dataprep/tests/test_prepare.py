"""prepare: whatever a collection of prompts looks like, one JSON object a line comes out, or the line that is wrong."""

import gzip
import json
import os

import polars as pl
import pytest
from flowgrpo_dataprep.cli import main
from flowgrpo_dataprep.errors import InputError
from flowgrpo_dataprep.prepare import prepare
from flowgrpo_dataprep.source import validate_prompt_file


def prepared(tmp_path, *inputs, source="prompts", **settings):
    out = tmp_path / "out" / "prompts.jsonl"
    report = prepare(source=source, inputs=list(inputs), output=out, **settings)
    return report, [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]


def written(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_plain_text_becomes_one_record_a_line(tmp_path):
    path = written(tmp_path, "train.txt", "a red panda in a teacup\nzwei Gläser\n")
    report, records = prepared(tmp_path, path, source="pickapic")
    assert records == [
        {"prompt": "a red panda in a teacup", "metadata": {"task": "t2i", "sample_id": "pickapic_0000001"}},
        {"prompt": "zwei Gläser", "metadata": {"task": "t2i", "sample_id": "pickapic_0000002"}},
    ]
    assert (report.read, report.written) == (2, 2)
    assert validate_prompt_file(tmp_path / "out" / "prompts.jsonl") == []


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\ntwo", ["one", "two"]),
        (b"a\ttab\n", ["a\ttab"]),
        ("line\u2028separator\x0b\x85 kept\n".encode(), ["line\u2028separator\x0b\x85 kept"]),
        ("\u732b\u3068\u72ac \U0001f43c e\u0301\n".encode(), ["\u732b\u3068\u72ac \U0001f43c e\u0301"]),
        (b"  padded  \n\n \nlast", ["padded", "last"]),
    ],
    ids=["crlf", "bom", "tab", "unicode line ends", "unicode kept", "blank lines"],
)
def test_text_of_every_kind_keeps_its_characters(tmp_path, data, expected):
    _, records = prepared(tmp_path, written(tmp_path, "p.txt", data))
    assert [record["prompt"] for record in records] == expected


def test_gzip_gives_what_the_plain_file_gives(tmp_path):
    data = b"\xef\xbb\xbfone\r\ntwo\n"
    _, plain = prepared(tmp_path, written(tmp_path, "p.txt", data))
    _, packed = prepared(tmp_path, written(tmp_path, "p.txt.gz", gzip.compress(data)))
    assert packed == plain


def test_jsonl_keeps_its_other_fields_as_metadata(tmp_path):
    line = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "two cups", "metadata": {"k": 1}}
    _, (record,) = prepared(tmp_path, written(tmp_path, "p.jsonl", json.dumps(line)), source="geneval")
    assert record["metadata"] == {
        "task": "t2i",
        "sample_id": "geneval_0000001",
        "tag": "counting",
        "include": [{"class": "cup", "count": 2}],
        "k": 1,
    }


def test_a_sample_id_of_its_own_is_kept(tmp_path):
    line = {"prompt": "x", "metadata": {"sample_id": "mine"}}
    _, (record,) = prepared(tmp_path, written(tmp_path, "p.jsonl", json.dumps(line)))
    assert record["metadata"]["sample_id"] == "mine"


@pytest.mark.parametrize("column", ["prompt", "caption"])
def test_parquet_gives_its_prompt_column(tmp_path, column):
    path = tmp_path / "p.parquet"
    pl.DataFrame({"jpg_0": [b"\x00"] * 40_000, column: [f"prompt {k}" for k in range(40_000)]}).write_parquet(path)
    report, records = prepared(tmp_path, path)
    assert report.written == 40_000
    assert records[39_999] == {"prompt": "prompt 39999", "metadata": {"task": "t2i", "sample_id": "prompts_0040000"}}


def test_pickapic_prefers_the_caption_and_prompts_the_prompt(tmp_path):
    path = written(tmp_path, "p.jsonl", '{"caption": "c", "prompt": "p"}')
    prompts = [prepared(tmp_path, path, source=source)[1][0]["prompt"] for source in ("pickapic", "prompts")]
    assert prompts == ["c", "p"]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("README.md", "ignored")):
        written(folder, name, text)
    _, records = prepared(tmp_path, folder)
    assert [(r["prompt"], r["metadata"]["sample_id"]) for r in records] == [
        ("first", "prompts_0000001"),
        ("second", "prompts_0000002"),
    ]


def test_ocr_prompts_carry_the_text_to_draw(tmp_path):
    path = written(tmp_path, "p.txt", 'a sign that says "Open" and \u201c24 h\u201d\n')
    _, (record,) = prepared(tmp_path, path, source="ocr", reward="ocr")
    assert record["metadata"] == {"task": "t2i", "sample_id": "ocr_0000001", "text": "Open 24 h", "reward": "ocr"}


@pytest.mark.parametrize(
    ("source", "name", "data", "number", "said"),
    [
        ("prompts", "p.txt", b"good\n\xff\xfe\n", 2, "not UTF-8 at byte 0 (0xff)"),
        ("prompts", "p.jsonl", b'{"prompt": "a"}\n{"prompt": ', 2, "not JSON"),
        ("prompts", "p.jsonl", b'{"text": "a"}', 1, "no prompt or caption"),
        ("prompts", "p.jsonl", b'{"prompt": ""}', 1, "not blank"),
        ("prompts", "p.jsonl", b'{"prompt": "a", "metadata": {"task": "t2v"}}', 1, "'t2v'"),
        ("prompts", "p.jsonl", b'"a"', 1, "a JSON str"),
        ("ocr", "p.txt", b"no quotes here", 1, "no text in double quotes"),
        ("prompts", "p.txt.gz", gzip.compress(b"one\ntwo\n")[:-9], 3, "gzip"),
        ("prompts", "p.txt", b"\xff\xfeo\x00n\x00", 0, "UTF-16"),
        ("prompts", "p.txt", b"\n\n", 0, "no prompt in 2 lines"),
        ("prompts", "p.txt", b"one\na\0b\n", 2, "NUL"),
        ("prompts", "p.txt", b"one\rtwo\rthree\r", 1, "tr '\\r' '\\n'"),
        ("prompts", "p.jsonl", b'{"prompt": "one"}\n{"prompt": "a\\r\\nb"}', 2, "carriage return"),
        ("prompts", "p.csv", b"a", 0, ".csv"),
        ("prompts", "p.parquet", b"PAR1 and no more", 0, "parquet"),
    ],
)
def test_a_bad_input_is_named_with_its_line_and_leaves_no_output(tmp_path, source, name, data, number, said):
    path = written(tmp_path, name, data)
    with pytest.raises(InputError) as error:
        prepared(tmp_path, path, source=source)
    assert (error.value.path, error.value.line) == (str(path), number)
    assert said in error.value.what
    assert not list((tmp_path / "out").glob("*"))


def test_a_parquet_file_without_prompts_says_what_it_has(tmp_path):
    path = tmp_path / "p.parquet"
    pl.DataFrame({"text": ["a"], "n": [1]}).write_parquet(path)
    with pytest.raises(InputError) as error:
        prepared(tmp_path, path)
    assert "text, n" in error.value.what


def test_a_parquet_file_with_a_broken_page_is_said_in_words(tmp_path):
    path = tmp_path / "p.parquet"
    pl.DataFrame({"prompt": [f"prompt {k}" for k in range(5_000)]}).write_parquet(path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[8 : len(data) // 2] = bytes(len(data) // 2 - 8)  # the schema stands at the end and is whole
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        prepared(tmp_path, path)
    assert "not a readable parquet file" in error.value.what
    assert not list((tmp_path / "out").glob("*"))


def test_a_linked_output_stays_a_link_and_the_file_behind_it_is_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "behind.jsonl").write_text("old")
    link = tmp_path / "out" / "prompts.jsonl"
    link.symlink_to("../behind.jsonl")
    _, (record,) = prepared(tmp_path, written(tmp_path, "p.txt", "one"))
    assert link.is_symlink()
    assert json.loads((tmp_path / "behind.jsonl").read_text()) == record


def test_an_output_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError) as error:
            prepare(source="prompts", inputs=[written(tmp_path, "p.txt", "one")], output=output)
        assert "no regular file" in error.value.what


def test_what_the_system_refuses_is_one_sentence(tmp_path, capsys):
    good = written(tmp_path, "p.txt", "one\n")
    out = str(good / "o.jsonl")  # below a file
    assert main(["prepare", "--source", "prompts", "--input", str(good), "--output", out]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dataprep: {good}")
    assert "Traceback" not in said


def test_bad_lines_can_be_skipped_and_are_counted_and_ids_do_not_move(tmp_path):
    path = written(tmp_path, "p.txt", b"one\n\xff\nthree\n\n")
    report, records = prepared(tmp_path, path, on_error="skip")
    assert [(r["prompt"], r["metadata"]["sample_id"]) for r in records] == [
        ("one", "prompts_0000001"),
        ("three", "prompts_0000003"),
    ]
    assert (report.read, report.written, report.skipped, report.blank) == (4, 2, 1, 1)
    assert "line 2" in report.first_skipped[0]


def test_the_command_prints_counts_and_says_errors_on_stderr(tmp_path, capsys):
    good, bad = written(tmp_path, "p.txt", "one\n"), tmp_path / "nowhere.txt"
    out = str(tmp_path / "o.jsonl")
    assert main(["prepare", "--source", "prompts", "--input", str(good), "--output", out]) == 0
    assert "wrote 1" in capsys.readouterr().out
    assert main(["prepare", "--source", "prompts", "--input", str(bad), "--output", out]) == 2
    assert "nowhere.txt: no such file" in capsys.readouterr().err
