"""Checkpoints on disk: exact, committed last, distrustful of whatever is spoilt."""

import json
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from flowgrpo_fsdp_actor import ActorConfig, checkpoint_files
from flowgrpo_fsdp_actor.checkpoint_files import (
    COMMITTED,
    JSON_FILES,
    LATEST,
    CheckpointTree,
    commit_record,
    load_checkpoint,
    rotate,
)
from flowgrpo_fsdp_actor.contract import adapter_contract, assert_resumable, base_model_hash
from flowgrpo_fsdp_actor.errors import CheckpointError, NotResumable
from flowgrpo_fsdp_actor.testing import SAMPLING, largest_file
from flowgrpo_rollout_sglang.sglang_process import free_ports
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from .processes import PROCESSES
from .saver import ADVANTAGES, LORA, save, saver_main, weights


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", [LORA, {}], ids=["lora", "full"])
def test_a_run_that_was_saved_and_loaded_ends_with_the_same_weights_bit_for_bit(
    make_actor, rollouts, model_folder, tmp_path, settings, device
):
    settings = settings | {"device": device}
    whole = make_actor(**settings, lr_warmup_iters=6)
    for r in range(4):
        whole.update(r, rollouts[r], ADVANTAGES)
    first = make_actor(**settings, lr_warmup_iters=6)
    for r in range(2):
        first.update(r, rollouts[r], ADVANTAGES)
    tree = save(first, model_folder, tmp_path, n=1)
    second = make_actor(**settings, lr_warmup_iters=6)
    state = load_checkpoint(second, tree, tree.newest())
    assert state["rollout_id"] == 1
    for r in range(2, 4):
        second.update(r, rollouts[r], ADVANTAGES)
    ended, resumed = weights(whole), weights(second)
    assert ended.keys() == resumed.keys()
    assert all(torch.equal(ended[name], resumed[name]) for name in ended)


def test_the_layout_is_the_specified_one_and_a_lora_checkpoint_holds_the_adapter_alone(
    make_actor, model_folder, tmp_path
):
    """C1, C4."""
    tree = save(make_actor(**LORA), model_folder, tmp_path, n=20)
    folder = tmp_path / "t2i" / "iter_0000020"
    assert {path.name for path in folder.iterdir()} == {
        "fsdp", "rng_rank0.pt", "checksums_rank0.json", COMMITTED, "metrics.jsonl", *JSON_FILES
    }  # fmt: skip
    assert (tmp_path / LATEST).read_text().strip() == (tmp_path / "t2i" / LATEST).read_text().strip() == "20"
    names = [name for path in (folder / "fsdp").glob("*.safetensors") for name in load_file(path)]
    assert names
    assert all(".lora_" in name for name in names)
    assert tree.committed() == [20]


def test_the_shards_are_those_of_dcp_and_its_own_reader_reads_them(make_actor, rollouts, model_folder, tmp_path):
    actor = make_actor(fsdp_param_dtype="bf16", fsdp_master_dtype="fp32")  # one rank, sharded
    actor.update(0, rollouts[0], ADVANTAGES)
    tree = save(actor, model_folder, tmp_path)
    expected = weights(actor)
    read = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tree.iteration(0) / "fsdp")))
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_nothing_in_a_checkpoint_is_a_pickle_that_could_run_code(make_actor, model_folder, tmp_path):
    tree = save(make_actor(**LORA), model_folder, tmp_path)
    folder = tree.iteration(0)
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {
        ".json",
        ".jsonl",
        ".safetensors",
        ".pt",
        "",
    }
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (marker,))

    rng = folder / "rng_rank0.pt"
    torch.save({"torch": Evil()}, rng)
    state = json.loads((folder / "trainer_state.json").read_text())
    state["files"]["rng_rank0.pt"] = rng.stat().st_size
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / COMMITTED).write_text(commit_record(folder, 0))  # a stranger can make it all agree
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(make_actor(**LORA), tree, 0)
    assert error.value.path == str(rng)
    assert not marker.exists()


def truncated_shard(folder):
    path = next((folder / "fsdp").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-64])


def missing_shard(folder):
    next((folder / "fsdp").glob("*.safetensors")).unlink()


def flipped_bit_in_a_shard(folder):
    """Of the same size, with a good header."""
    path = next((folder / "fsdp").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 8
    path.write_bytes(data)


def damaged_header_of_the_same_size(folder):
    path = next((folder / "fsdp").glob("*.safetensors"))
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def cut_json(folder):
    (folder / "trainer_state.json").write_text('{"rollout_id": ')


def edited_json(folder):
    path = folder / "trainer_state.json"
    path.write_text(path.read_text().replace('"rollout_id": 0', '"rollout_id": 7'))


def edited_alpha(folder):
    path = folder / "adapter_contract.json"
    path.write_text(path.read_text().replace('"lora_alpha": 8.0', '"lora_alpha": 9.0'))


def other_random_state(folder):
    path = folder / "rng_rank0.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def missing_json(folder):
    (folder / "adapter_contract.json").unlink()


def uncommitted(folder):
    (folder / COMMITTED).unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        *(truncated_shard, missing_shard, flipped_bit_in_a_shard, damaged_header_of_the_same_size),
        *(cut_json, edited_json, edited_alpha),
        *(missing_json, other_random_state, uncommitted),
    ],
)
def test_a_spoilt_checkpoint_is_refused_by_name_and_moves_no_weight(make_actor, model_folder, tmp_path, spoil):
    saved = make_actor(**LORA)
    tree = save(saved, model_folder, tmp_path)
    spoil(tree.iteration(0))
    actor = make_actor(**LORA, seed=5)
    before = weights(actor)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(actor, tree, 0)
    assert str(tree.iteration(0)) in error.value.path
    assert pickle.loads(pickle.dumps(error.value)).path == error.value.path
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())


def from_a_stranger(folder, **small_files):
    """Replaces small files, and makes COMMITTED agree, as whoever hands out a checkpoint can."""
    for name, text in small_files.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    (folder / COMMITTED).write_text(commit_record(folder, 0))


def size_of_a_file_outside(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    state["files"]["../../../secret"] = 3
    from_a_stranger(folder, trainer_state_json=json.dumps(state))


def hash_of_a_file_outside(folder):
    record = json.loads((folder / COMMITTED).read_text())
    record["sha256"]["/dev/zero"] = "0"  # reading it would never end
    (folder / COMMITTED).write_text(json.dumps(record))


def link_to_a_device(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/dev/zero")


def shard_outside(folder):
    from_a_stranger(folder, checksums_rank0_json=json.dumps({"../../../secret.safetensors": [0]}))


def endless_header(folder):
    path = next((folder / "fsdp").glob("*.safetensors"))
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def deep_json(folder):
    from_a_stranger(folder, adapter_contract_json="[" * 200_000)


def no_rollout_id(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    from_a_stranger(folder, trainer_state_json=json.dumps(state | {"rollout_id": None}))


def no_checksums(folder):
    from_a_stranger(folder, checksums_rank0_json="{}")


def foreign_random_state(folder):
    torch.save({"torch": torch.zeros(3, dtype=torch.uint8), "cuda": None}, folder / "rng_rank0.pt")
    state = json.loads((folder / "trainer_state.json").read_text())
    state["files"]["rng_rank0.pt"] = (folder / "rng_rank0.pt").stat().st_size
    from_a_stranger(folder, trainer_state_json=json.dumps(state))


@pytest.mark.parametrize(
    "spoil",
    [
        *(size_of_a_file_outside, hash_of_a_file_outside, link_to_a_device, shard_outside, endless_header, deep_json),
        *(no_rollout_id, no_checksums, foreign_random_state),
    ],
)
def test_a_strangers_checkpoint_is_refused_in_words_whatever_it_says(make_actor, model_folder, tmp_path, spoil):
    actor = make_actor(**LORA)
    tree = save(actor, model_folder, tmp_path)
    spoil(tree.iteration(0))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(actor, tree, 0)
    assert str(tree.iteration(0)) in error.value.path


def test_another_rank_finds_no_place_in_the_checkpoint(make_actor, model_folder, tmp_path):
    tree = save(make_actor(**LORA), model_folder, tmp_path)
    with pytest.raises(CheckpointError):
        load_checkpoint(make_actor(**(LORA | {"lora_rank": 8})), tree, 0)


def test_an_empty_folder_and_a_lost_newest_checkpoint_are_said_not_passed_over(make_actor, model_folder, tmp_path):
    tree = CheckpointTree(tmp_path, "t2i")
    with pytest.raises(CheckpointError):
        tree.newest()
    actor = make_actor(**LORA)
    save(actor, model_folder, tmp_path, n=0)
    save(actor, model_folder, tmp_path, n=1)
    shutil.rmtree(tree.iteration(1))
    with pytest.raises(CheckpointError) as error:
        tree.newest()
    assert "iter_0000001" in error.value.path


def test_a_kill_between_commit_and_latest_resumes_from_the_committed_one(make_actor, model_folder, tmp_path):
    actor = make_actor(**LORA)
    tree = save(actor, model_folder, tmp_path, n=0)
    save(actor, model_folder, tmp_path, n=1)
    (tmp_path / "t2i" / LATEST).write_text("0\n")
    assert tree.newest() == 1


@pytest.mark.parametrize(("keep", "left"), [(3, [2, 3]), (2, [3]), (1, [3])])
def test_rotation_leaves_room_for_the_next_and_never_takes_the_last(make_actor, model_folder, tmp_path, keep, left):
    actor = make_actor(**LORA)
    for n in range(4):
        tree = save(actor, model_folder, tmp_path, n=n)
    tree.iteration(9).mkdir()  # a leftover of a killed save
    removed = rotate(tree, keep)
    assert tree.committed() == left
    assert removed == [n for n in range(4) if n not in left]
    assert not tree.iteration(9).exists()


def test_a_write_that_the_disk_refuses_commits_nothing_names_the_file_and_gives_its_bytes_back(
    make_actor, model_folder, tmp_path
):
    actor = make_actor(**LORA)
    tree = save(actor, model_folder, tmp_path, n=0)
    with largest_file(20_000), pytest.raises(CheckpointError) as error:
        save(actor, model_folder, tmp_path, n=1)
    assert error.value.path == str(tree.iteration(1) / "fsdp" / "rank00000-00000.safetensors")
    assert tree.committed() == [0]
    assert tree.newest() == 0
    assert not tree.iteration(1).exists()  # its bytes would keep the disk full
    save(actor, model_folder, tmp_path, n=2)
    assert tree.newest() == 2


def test_a_rank_that_does_not_see_the_folder_that_rank_0_made_is_told_to_share_it(
    make_actor, model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_files, "_fresh", lambda folder: None)  # as if made on another node's disk
    with pytest.raises(CheckpointError) as error:
        save(make_actor(**LORA), model_folder, tmp_path, n=1)
    assert "--save" in error.value.fix
    assert "share" in error.value.fix


@pytest.mark.parametrize(
    "change",
    [{"lora_rank": 8}, {"lora_alpha": 16.0}, {"lora_target_modules": ("attn.to_q",)}, {"fsdp_trainable_mode": "full"}],
    ids=lambda change: next(iter(change)),
)
def test_a_resume_with_other_settings_is_refused_by_name(model_folder, change):
    base = {"model_path": str(model_folder), "sampling": SAMPLING} | LORA
    fingerprint = base_model_hash(model_folder, None)
    saved = adapter_contract(ActorConfig(**base), ("attn.to_k",), fingerprint)
    now = adapter_contract(ActorConfig(**(base | change)), ("attn.to_k",), fingerprint)
    assert_resumable(saved, saved, "here")
    with pytest.raises(NotResumable) as error:
        assert_resumable(saved, now, "here")
    expected = "mode" if "fsdp_trainable_mode" in change else next(iter(change))
    assert expected in error.value.differing


def test_the_base_model_hash_sees_one_changed_weight_and_another_revision(model_folder, tmp_path):
    before = base_model_hash(model_folder, None)
    assert before == base_model_hash(model_folder, None)
    assert before != base_model_hash(model_folder, "v2")
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    path = next((copy / "transformer").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert base_model_hash(copy, None) != before


# ---------------------------------------------------------------------------------------------------- crashes


def test_a_save_killed_at_a_random_moment_leaves_a_committed_checkpoint_that_loads(make_actor, model_folder, tmp_path):
    """With rotation on. FLOWGRPO_TEST_KILLS raises the number of kills."""
    generator, actor = random.Random(0), make_actor(**LORA)
    tree, newest = CheckpointTree(tmp_path, "t2i"), -1
    for kill in range(int(os.environ.get("FLOWGRPO_TEST_KILLS", "2"))):
        saver = PROCESSES.Process(target=saver_main, args=(model_folder, tmp_path, *free_ports(1)), daemon=True)
        saver.start()
        while (tree.committed() or [-1])[-1] <= newest:  # at least one more is committed, then any moment will do
            assert saver.is_alive()
            time.sleep(0.002)
        newest = tree.committed()[-1]
        time.sleep(generator.uniform(0.0, 0.5))
        saver.kill()
        saver.join()
        assert saver.exitcode == -signal.SIGKILL
        n = tree.newest()
        assert n >= newest, f"kill {kill}"
        newest = n
        assert load_checkpoint(actor, tree, n)["rollout_id"] == n
        assert 1 <= len(tree.committed()) <= 2
