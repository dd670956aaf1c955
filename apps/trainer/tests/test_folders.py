"""The folders that a run writes are its own, and every node sees them."""

import pickle

import pytest
from flowgrpo_rollout_sglang.artifacts import ArtifactStore, FolderInUse, owned
from flowgrpo_trainer.cli import parse
from flowgrpo_trainer.errors import FolderNotShared
from flowgrpo_trainer.folders import assert_shared, owned_folders, written_folders
from flowgrpo_trainer.main import main


def wiring(tmp_path):
    """Settings of a run with both folders, and its store."""
    words = ["--recipe", "quickstart", "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save")]
    settings, _ = parse(words, {})
    return settings, ArtifactStore(tmp_path / "artifacts")


def test_two_runs_never_share_a_folder_of_artifacts_or_checkpoints(tmp_path):
    settings, store = wiring(tmp_path)
    with owned_folders(settings, store):
        for elsewhere in (ArtifactStore(tmp_path / "artifacts"), ArtifactStore(tmp_path / "others")):
            with pytest.raises(FolderInUse) as error, owned_folders(settings, elsewhere):
                pass
            assert error.value.setting == ("--artifact-root" if elsewhere == store else "--save")
            assert str(tmp_path / "run") in error.value.holder
    with owned_folders(settings, store):
        pass


def test_a_run_whose_artifacts_belong_to_another_one_is_refused_before_anything_starts(tmp_path, capsys):
    folder = tmp_path / "artifacts" / "t2i"
    words = ["--recipe", "quickstart", "--artifact-root", str(tmp_path / "artifacts")]
    with owned(folder, setting="--artifact-root", run_dir="runs/first"), pytest.raises(SystemExit) as ended:
        main([*words, "--run-dir", str(tmp_path / "second")])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    for word in ("--artifact-root", str(folder), "runs/first"):
        assert word in said
    assert not (tmp_path / "second").exists()


def test_a_folder_that_every_rank_sees_passes_and_keeps_nothing_of_the_check(tmp_path):
    folders = written_folders(*wiring(tmp_path))
    assert_shared(folders, lambda paths: [("192.0.2.1", [path.read_text() for path in paths])] * 2)
    assert [list(folder.iterdir()) for folder in folders.values()] == [[], []]


def test_a_folder_that_is_another_one_on_another_node_is_refused_naming_the_node(tmp_path):
    """The second node has an empty disk of its own where --save should be; it shares the artifacts."""

    def read(paths):
        artifacts, save = (path.read_text() for path in paths)
        return [("192.0.2.1", [artifacts, save])] * 2 + [("192.0.2.2", [artifacts, ""])] * 2

    folders = written_folders(*wiring(tmp_path))
    with pytest.raises(FolderNotShared) as caught:
        assert_shared(folders, read)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.flag == "--save"
    assert error.nodes == {2: "192.0.2.2", 3: "192.0.2.2"}
    for word in (str(tmp_path / "save" / "t2i"), "192.0.2.2", "2 ranks", "share"):
        assert word in str(error)
