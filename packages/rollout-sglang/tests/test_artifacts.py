"""A folder of artifacts has one owner at a time, for as long as that owner's process lives."""

import errno
import fcntl
import json
import os
import pickle
import signal

import pytest
from flowgrpo_rollout_sglang.artifacts import IN_USE, ArtifactStore, FolderInUse, owned


def owned_by(store, run_dir):
    return owned(store.folder, setting="--artifact-root", run_dir=run_dir)


def test_a_second_run_is_refused_while_the_first_lives_and_is_told_which_one_it_is(tmp_path):
    store = ArtifactStore(tmp_path)
    with owned_by(store, "runs/first"):
        with pytest.raises(FolderInUse) as error, owned_by(store, "runs/second"):
            pass
        for word in ("--artifact-root", str(store.folder), "runs/first", str(os.getpid()), os.uname().nodename):
            assert word in str(error.value)
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
        with owned_by(ArtifactStore(tmp_path, task="t2v"), "runs/second"):
            pass  # another task's folder
    with owned_by(store, "runs/second"):
        pass


def test_a_killed_run_never_blocks_the_next(tmp_path):
    store = ArtifactStore(tmp_path)
    ready, said = os.pipe()
    child = os.fork()
    if child == 0:  # which must never come back into pytest, nor live on without it
        signal.alarm(60)
        try:
            with owned_by(store, "runs/killed"):
                os.write(said, b"x")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"x"
    with pytest.raises(FolderInUse), owned_by(store, "runs/next"):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with owned_by(store, "runs/next"):
        assert "runs/next" in (store.folder / IN_USE).read_text()


def test_the_lock_is_the_sessions_and_neither_travels_with_the_store_nor_ends_with_it(tmp_path):
    store = ArtifactStore(tmp_path)
    with owned_by(store, "runs/first"):
        again = pickle.loads(pickle.dumps(store))
        assert again == store
        del again, store
        with pytest.raises(FolderInUse), owned_by(ArtifactStore(tmp_path), "runs/second"):
            pass


def test_pruning_leaves_the_lock_alone(tmp_path):
    store = ArtifactStore(tmp_path)
    with owned_by(store, "runs/first"):
        store.rollout_folder(5).mkdir()
        store.prune_stale(0)
        assert [path.name for path in store.folder.iterdir()] == [IN_USE]


def test_a_run_of_another_host_that_did_not_end_in_order_is_named(tmp_path, caplog):
    """Where a mount keeps locks local, this is all that can be seen of a run that lives there."""
    store = ArtifactStore(tmp_path)
    store.folder.mkdir()
    (store.folder / IN_USE).write_text(json.dumps({"host": "another-host", "pid": 7, "run_dir": "runs/there"}))
    with owned_by(store, "runs/here"):
        (said,) = caplog.messages
    assert "another-host" in said
    with owned_by(store, "runs/here"):
        assert len(caplog.messages) == 1  # the last one ended in order


def test_a_file_system_without_locks_is_said_and_does_not_stop_a_run(tmp_path, caplog, monkeypatch):
    def refuses(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    store = ArtifactStore(tmp_path)
    with owned_by(store, "runs/first"):
        (said,) = caplog.messages
    assert str(store.folder) in said
