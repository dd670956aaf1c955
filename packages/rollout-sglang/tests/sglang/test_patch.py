"""The patch and its copy: insertions only, tied to hashes, whole or absent. No server is started here."""

import ast
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from flowgrpo_rollout_sglang.patch import copy, insertions
from flowgrpo_rollout_sglang.patch.command import main
from flowgrpo_rollout_sglang.patch.insertions import Insertion, PatchError

STOCK = "a\nb\nc\n"
DIFF = "--- x.py\n+++ x.py\n@@ -1,0 +2,2 @@\n+one\n+two\n@@ -3,0 +6 @@\n+three\n"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(copy.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """An installed package that holds the touched files alone: 54 MB less to copy in each test."""
    manifest, _ = insertions.load()
    source, root = copy.installed_root(manifest), tmp_path / "sglang"
    for name in manifest.stock:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, root / name)
    monkeypatch.setattr(copy, "installed_root", lambda _: root)
    return root


def test_an_insertion_goes_behind_its_line_and_comes_out_again():
    pieces = insertions.parse(DIFF)["x.py"]
    assert pieces == [Insertion(1, ("one\n", "two\n")), Insertion(3, ("three\n",))]
    patched = insertions.insert(STOCK, pieces)
    assert patched == "a\none\ntwo\nb\nc\nthree\n"
    assert insertions.remove(patched, pieces) == STOCK
    assert insertions.diff_of({"x.py": STOCK}, {"x.py": patched}) == DIFF


def test_lines_that_were_edited_after_the_patch_are_not_taken_out():
    pieces = insertions.parse(DIFF)["x.py"]
    with pytest.raises(PatchError):
        insertions.remove(insertions.insert(STOCK, pieces).replace("two", "2"), pieces)


@pytest.mark.parametrize("hunk", ["@@ -1 +1 @@\n-a\n+A\n", "@@ -1,1 +0,0 @@\n-a\n", "@@ -1,0 +2 @@\n-a\n"])
def test_a_hunk_that_does_more_than_insert_is_refused(hunk):
    with pytest.raises(PatchError):
        insertions.parse(f"--- x.py\n+++ x.py\n{hunk}")


def test_the_shipped_patch_calls_only_modules_of_this_package():
    _, diff = insertions.load()
    imported = [line for line in diff.splitlines() if line.startswith("+") and " import " in line and "from" in line]
    assert imported
    assert all("from flowgrpo_rollout_sglang.server." in line for line in imported)


def test_apply_makes_a_whole_copy_and_leaves_the_environment_as_it_was(cache):
    manifest, _ = insertions.load()
    installed = copy.installed_root(manifest)
    folder = copy.apply()
    assert insertions.digests(installed, manifest.stock) == dict(manifest.stock)
    assert insertions.digests(folder / "sglang", manifest.patched) == dict(manifest.patched)
    for name in manifest.patched:
        ast.parse((folder / "sglang" / PurePosixPath(name)).read_text())
    files = list(installed.rglob("*.py"))
    assert len(files) == len(list((folder / "sglang").rglob("*.py")))
    # a link would let a write in the copy reach uv's cache, and through it every other environment
    assert not any((folder / "sglang" / p.relative_to(installed)).samefile(p) for p in files[:50])


def test_apply_twice_changes_nothing_and_revert_removes_the_copy(cache, installed):
    folder = copy.apply()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.py")}
    assert copy.apply() == copy.check() == folder
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.py")} == before
    assert copy.revert()
    assert not copy.revert()
    assert not folder.exists()


def test_a_damaged_copy_is_refused_with_the_command_that_mends_it(cache, installed):
    manifest, _ = insertions.load()
    folder = copy.apply()
    damaged = folder / "sglang" / next(iter(manifest.patched))
    damaged.write_text(damaged.read_text() + "# edited\n")
    with pytest.raises(PatchError) as error:
        copy.ensure()
    assert error.value.where == str(damaged)
    assert copy.APPLY in error.value.remedy
    assert copy.APPLY in str(pickle.loads(pickle.dumps(error.value)))
    assert copy.apply() == copy.check()


def test_a_copy_whose_making_was_killed_counts_as_absent(cache, installed):
    manifest, _ = insertions.load()
    copy.copy_folder(manifest).mkdir(parents=True)
    with pytest.raises(PatchError):
        copy.check()
    assert (copy.ensure() / "sglang").is_dir()


def test_another_version_is_refused_by_name(monkeypatch):
    manifest, _ = insertions.load()
    monkeypatch.setattr(copy.importlib.metadata, "version", lambda _: "0.6.0")
    with pytest.raises(PatchError) as error:
        copy.installed_root(manifest)
    assert error.value.where == "sglang 0.6.0"
    assert manifest.sglang_version in error.value.remedy


def test_a_release_with_other_files_is_refused_by_hash(cache, installed):
    manifest, _ = insertions.load()
    name = next(iter(manifest.stock))
    (installed / name).write_text("# another release\n")
    with pytest.raises(PatchError) as error:
        copy.apply()
    assert error.value.where.endswith(name)
    assert not copy.copy_folder(manifest).exists()


def test_in_place_replaces_files_and_never_writes_through_a_link(tmp_path, installed):
    manifest, _ = insertions.load()
    root, shared = installed, tmp_path / "shared-cache"
    for name in manifest.stock:  # as uv does: the installed file and the cache's are one file
        (shared / name).parent.mkdir(parents=True, exist_ok=True)
        (shared / name).hardlink_to(root / name)
    copy.apply_in_place()
    copy.apply_in_place()
    assert insertions.digests(root, manifest.patched) == dict(manifest.patched)
    assert insertions.digests(shared, manifest.stock) == dict(manifest.stock)
    copy.revert_in_place()
    assert insertions.digests(root, manifest.stock) == dict(manifest.stock)


def test_the_command_says_what_stands_by_its_exit_code(cache, installed, capsys):
    assert main(["patch", "check"]) == 1
    assert copy.APPLY in capsys.readouterr().err
    assert main(["patch", "apply"]) == 0
    assert main(["patch", "check"]) == 0
    assert main(["patch", "show"]) == 0
    assert insertions.load()[1].splitlines()[0] in capsys.readouterr().out


def test_the_check_imports_neither_sglang_nor_torch(cache, installed):
    copy.apply()
    program = (
        "import sys, json; from flowgrpo_rollout_sglang.patch import copy; copy.check(); "
        "print(json.dumps([m for m in ('sglang', 'torch') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []
