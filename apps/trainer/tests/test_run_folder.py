"""A run folder survives a kill at any moment, and a resume forgets exactly what it will do again."""

import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from flowgrpo_trainer.run_folder import (
    EvalSample,
    Evaluation,
    RunFolder,
    RunFolderError,
    append_jsonl,
    read_jsonl,
    write_json_atomic,
)


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.start({"seed": 1}, total_rollouts=10)
    return run


def steps(folder):
    return [record.step for record in folder.read_metrics()]


def evaluation(step, image=None):
    return Evaluation(step, {"held_out": [EvalSample("a red circle", 0.5, {"color": 0.5}, True, image)]})


def test_metrics_come_back_as_they_were_appended(folder):
    folder.append_metrics(0, {"reward/mean": 0.1 + 0.2, "train/loss": math.nan})
    (record,) = folder.read_metrics()
    assert record.step == 0
    assert record.metrics["reward/mean"] == 0.1 + 0.2
    assert math.isnan(record.metrics["train/loss"])
    assert "NaN" not in folder.metrics_path.read_text()  # every line is JSON for every reader


@pytest.mark.parametrize("torn", [b'{"step": 1, "ti', b'{"step": 1}', b"\0\0\0\0\n", b"\xff\xfe\n"], ids=repr)
def test_a_torn_last_line_is_not_read_and_the_next_append_removes_it(folder, torn):
    folder.append_metrics(0, {"a": 1.0})
    with open(folder.metrics_path, "ab") as file:
        file.write(torn)
    assert steps(folder) == [0]
    folder.append_metrics(1, {"a": 2.0})
    assert steps(folder) == [0, 1]
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_bytes().splitlines()] == [0, 1]


def test_a_torn_only_line_leaves_an_empty_record(folder):
    folder.metrics_path.write_bytes(b'{"st')
    assert steps(folder) == []
    folder.append_metrics(0, {})
    assert steps(folder) == [0]


def test_an_append_after_a_line_longer_than_one_block_keeps_that_line(folder):
    append_jsonl(folder.metrics_path, {"step": 0, "time": "t", "metrics": {}, "pad": "x" * 200_000})
    folder.append_metrics(1, {})
    assert steps(folder) == [0, 1]


def test_a_bad_line_in_the_middle_is_an_error_that_names_it(folder):
    folder.metrics_path.write_bytes(b'nonsense\n{"step": 1, "time": "t", "metrics": {}}\n')
    with pytest.raises(RunFolderError) as error:
        folder.read_metrics()
    assert error.value.path == folder.metrics_path
    assert "line 1" in error.value.why
    assert pickle.loads(pickle.dumps(error.value)).fix == error.value.fix


def test_a_killed_writer_leaves_only_whole_lines_and_they_are_all_that_it_had_acknowledged(tmp_path):
    """A real process, killed in the middle of its appends."""
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from pathlib import Path; from flowgrpo_trainer.run_folder import append_jsonl\n"
        "for k in range(100000):\n"
        "    append_jsonl(Path(sys.argv[1]), {'step': k, 'pad': 'x' * 20000})\n"
        "    print(k, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as writer:
        for line in writer.stdout:
            if int(line) == 30:
                writer.send_signal(signal.SIGKILL)
                break
        acknowledged = [int(line) for line in writer.stdout] or [30]
    found = [record["step"] for record in read_jsonl(path)]
    assert found == list(range(len(found)))
    assert len(found) in (acknowledged[-1] + 1, acknowledged[-1] + 2)  # the last may be written, not yet said


def test_a_resume_drops_metrics_from_its_step_and_evaluations_after_it(folder, tmp_path):
    for step in range(5):
        folder.append_metrics(step, {"a": step})
    picture = tmp_path / "p.png"
    for step in (0, 2, 4):
        picture.write_bytes(b"png")
        folder.write_eval(evaluation(step, folder.keep_image(picture, step=step, set_name="held_out", index=0)))
    folder.mark_ended("interrupted")

    folder.start({"seed": 1}, total_rollouts=10, resume_step=2)

    assert steps(folder) == [0, 1]
    assert [e.step for e in folder.read_evals()] == [0, 2]
    assert not (folder.evals_dir / "step_0000004").exists()
    assert folder.read_ended() is None
    assert [start["from_step"] for start in folder.read_settings()["starts"]] == [0, 2]


def test_a_new_run_is_refused_where_a_run_is_and_changes_nothing(folder):
    folder.append_metrics(0, {})
    before = folder.settings_path.read_bytes()
    with pytest.raises(RunFolderError) as error:
        folder.start({}, total_rollouts=1)
    assert error.value.path == folder.path
    assert folder.settings_path.read_bytes() == before
    assert steps(folder) == [0]


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as error:
        RunFolder(tmp_path / "file" / "run").start({}, total_rollouts=1)
    assert error.value.path == tmp_path / "file" / "run"


def test_settings_are_written_as_json_with_versions_and_without_passwords(tmp_path):
    @dataclass
    class Settings:
        out: Path
        sizes: tuple[int, ...]
        url: str

    run = RunFolder(tmp_path)
    run.start(Settings(Path("runs/x"), (1, 2), "http://me:hunter2@host/metrics"), total_rollouts=3)
    info = run.read_settings()
    assert info["settings"] == {"out": "runs/x", "sizes": [1, 2], "url": "http://***@host/metrics"}
    assert info["total_rollouts"] == 3
    assert {"python", "torch", "diffusers", "flowgrpo-trainer"} <= info["versions"].keys()
    assert "hunter2" not in run.settings_path.read_text()


def test_an_evaluation_comes_back_whole_with_a_picture_that_pruning_cannot_take(folder, tmp_path):
    artifact = tmp_path / "artifact.png"
    artifact.write_bytes(b"picture")
    image = folder.keep_image(artifact, step=3, set_name="../odd name", index=0)
    written = evaluation(3, image)
    folder.write_eval(written)
    artifact.unlink()
    (read,) = folder.read_evals()
    assert read.sets == written.sets
    assert (folder.path / image).read_bytes() == b"picture"
    assert (folder.path / image).resolve().is_relative_to(folder.evals_dir.resolve())


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "settings.json"
    write_json_atomic(path, {"old": True})
    with pytest.raises(ValueError):
        write_json_atomic(path, {"bad": math.nan})
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError):
        write_json_atomic(tmp_path / "folder.json", {})
    assert json.loads(path.read_text()) == {"old": True}
    assert sorted(os.listdir(tmp_path)) == ["folder.json", "settings.json"]


def test_a_leftover_of_a_killed_atomic_write_is_removed_by_the_next_start(folder):
    leftover = folder.path / ".settings.json.123.tmp"
    leftover.write_text("{ha")
    folder.start({}, total_rollouts=1, resume_step=0)
    assert not leftover.exists()


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("")])
def test_what_is_no_run_folder_is_said(tmp_path, make):
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(RunFolderError) as error:
        RunFolder(path).check()
    assert error.value.path == path


@pytest.mark.parametrize(
    "write",
    [lambda path: append_jsonl(path, {"a": "x" * 5000}), lambda path: write_json_atomic(path, {"a": "x" * 5000})],
)
def test_a_write_that_the_disk_refuses_names_its_file_and_leaves_the_old_one(folder, write):
    """A real refusal in the middle of a write, as of a full disk, which names no file by itself."""
    folder.append_metrics(0, {"a": 1.0})
    before, limit = folder.metrics_path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        with pytest.raises(OSError) as error:
            write(folder.metrics_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error.value.filename == str(folder.metrics_path)
    assert folder.metrics_path.read_bytes() == before
