import os
import pickle
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from flowgrpo_rollout_sglang.artifacts import ArtifactStore
from flowgrpo_rollout_sglang.config import SamplingConfig
from flowgrpo_rollout_sglang.files import write_atomic
from flowgrpo_rollout_sglang.request import GroupRequest, GroupTrajectory
from flowgrpo_rollout_sglang.sidecar import SidecarError, candidate_manifests, read_sidecar, write_sidecar
from PIL import Image
from safetensors.torch import save_file


def trajectory(group_index=0, N=3, sde_indices=(1, 2, 4)):
    sampling = SamplingConfig(height=8, width=8, num_inference_steps=6, sde_indices=sde_indices)
    request = GroupRequest(
        group_index=group_index,
        prompt="ein rotes Dreieck, «größer»",
        sample_ids=tuple(f"prompt:a:sample:{slot}" for slot in range(N)),
        sampling=sampling,
        sigmas=(1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0),
        sde_indices=sde_indices,
        noise_seed=2**62 + 1,
        metadata={"sample_id": "a", "extra": [1, None]},
    )
    U = len(request.state_indices)
    return GroupTrajectory(
        request=request,
        height=8,
        width=8,
        sigmas=torch.tensor(request.sigmas),
        latents_NUPC=torch.randn(N, U, 4, 48),
        log_probs_NS=torch.randn(N, len(sde_indices)),
        prompt_embeds_LE=torch.randn(5, 16, dtype=torch.bfloat16),
        images_NHWC=torch.randint(0, 256, (N, 8, 8, 3), dtype=torch.uint8),
        policy_version=7,
    )


def test_the_states_that_replay_needs_are_both_ends_of_each_trained_step():
    assert trajectory().request.state_indices == (1, 2, 3, 4, 5)


def test_a_sidecar_gives_back_everything_but_the_pictures_bit_for_bit(tmp_path):
    written = trajectory()
    write_sidecar(tmp_path / "a.safetensors", written, "hash")
    read = read_sidecar(tmp_path / "a.safetensors")
    assert read.request == written.request
    assert (read.height, read.width, read.policy_version, read.images_NHWC) == (8, 8, 7, None)
    for name in ("sigmas", "latents_NUPC", "log_probs_NS", "prompt_embeds_LE"):
        assert torch.equal(getattr(read, name), getattr(written, name))


def test_the_file_keeps_its_three_namespaces_and_a_manifest_for_each_candidate(tmp_path):
    """E7."""
    from safetensors import safe_open

    written = trajectory()
    write_sidecar(tmp_path / "a.safetensors", written, "hash")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert {name.split(".")[0] for name in file.keys()} == {"common", "conditions", "tracks"}  # noqa: SIM118
        assert "weight_manifest_hash" in file.metadata()["candidates"]
    manifests = candidate_manifests(written, "hash")
    assert [m["sample_id"] for m in manifests] == list(written.request.sample_ids)
    assert {m["policy_version"] for m in manifests} == {7}
    assert {m["sampling_fingerprint"] for m in manifests} == {written.request.sampling.fingerprint()}


@pytest.mark.parametrize("field", ["latents_NUPC", "log_probs_NS"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_written(tmp_path, field, value):
    spoilt = trajectory()
    getattr(spoilt, field).view(-1)[0] = value
    with pytest.raises(SidecarError):
        write_sidecar(tmp_path / "a.safetensors", spoilt)
    assert list(tmp_path.iterdir()) == []


def test_a_trajectory_without_a_trained_step_is_refused(tmp_path):
    with pytest.raises(SidecarError):
        write_sidecar(tmp_path / "a.safetensors", trajectory(sde_indices=()))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def foreign(path):
    save_file({"weight": torch.zeros(2)}, path)


def gone(path):
    path.unlink()


@pytest.mark.parametrize("spoil", [cut, empty, foreign, gone])
def test_a_file_that_cannot_be_trusted_is_refused_by_name(tmp_path, spoil):
    path = tmp_path / "group_00000000.safetensors"
    write_sidecar(path, trajectory())
    spoil(path)
    with pytest.raises(SidecarError) as error:
        read_sidecar(path)
    assert error.value.path == str(path)
    assert pickle.loads(pickle.dumps(error.value)).path == str(path)


def test_the_artifact_tree_is_laid_out_as_specified(tmp_path):
    store = ArtifactStore(tmp_path)
    (files,) = store.write_groups(12, [trajectory(group_index=3)])
    folder = tmp_path / "t2i" / "rollout_0000012"
    assert files.sidecar == folder / "group_00000003.safetensors" == store.sidecar_path(12, 3)
    assert [p.name for p in files.images] == [f"group_00000003_sample_{slot:04d}.png" for slot in range(3)]
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in (files.sidecar, *files.images))
    store.write_groups(12, [trajectory()], evaluation=True)
    assert {p.suffix for p in (tmp_path / "eval" / "t2i" / "rollout_0000012").iterdir()} == {".png"}


def test_a_picture_is_stored_without_loss(tmp_path):
    drawn = trajectory()
    (files,) = ArtifactStore(tmp_path).write_groups(0, [drawn])
    for path, image in zip(files.images, drawn.images_NHWC, strict=True):
        assert list(Image.open(path).tobytes()) == image.flatten().tolist()


@pytest.mark.parametrize(("keep", "left"), [(2, [9]), (1, []), (0, list(range(10))), (-1, list(range(10)))])
def test_pruning_keeps_the_latest_rollouts_and_drops_what_a_killed_run_left(tmp_path, keep, left):
    store = ArtifactStore(tmp_path, retention_rollouts=keep)
    for rollout_id in range(12):
        store.rollout_folder(rollout_id).mkdir(parents=True)
    store.prune_stale(10)
    kept = [int(path.name.removeprefix("rollout_")) for path in (tmp_path / "t2i").iterdir()]
    assert sorted(kept) == left  # and rollout 10 itself is written next


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_sidecar import trajectory
from flowgrpo_rollout_sglang.artifacts import ArtifactStore
store, rollout_id = ArtifactStore(Path(sys.argv[1])), 0
print("ready", flush=True)
while True:
    store.write_groups(rollout_id % 3, [trajectory(g) for g in range(4)])
    rollout_id += 1
"""


def test_a_writer_killed_at_any_moment_leaves_no_half_file_under_a_final_name(tmp_path):
    here = os.path.dirname(__file__)
    for kill in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), here], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert writer.stdout.readline() == b"ready\n"
        try:
            writer.wait(timeout=0.05 + 0.06 * kill)
        except subprocess.TimeoutExpired:
            writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        # safetensors writes under a hidden name of its own first
        files = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".tmp" and not p.name.startswith(".")]
        assert files
        for path in files:
            if path.suffix == ".safetensors":
                read_sidecar(path)
            else:
                Image.open(path).load()


def test_a_sidecar_whose_shapes_disagree_is_refused(tmp_path):
    whole = trajectory()
    with pytest.raises(SidecarError):
        write_sidecar(tmp_path / "a.safetensors", replace(whole, latents_NUPC=whole.latents_NUPC[:, :-1]))


def test_a_sidecar_that_the_disk_refuses_is_named_and_leaves_nothing(tmp_path):
    """A real refusal in the middle of a write, as of a full disk, which names no file by itself."""
    path, limit = tmp_path / "group.bin", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError) as error:
            write_atomic(path, lambda temporary: temporary.write_bytes(b"x" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
