"""Several lives of a run: killed and resumed, on as many ranks or others, bit for bit the run that it was."""

import pickle

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from flowgrpo_fsdp_actor import ActorConfig
from flowgrpo_fsdp_actor.adapters.qwen_image import QwenImageAdapter
from flowgrpo_fsdp_actor.testing import SAMPLING, draw_rollout
from flowgrpo_rollout_sglang.sglang_process import free_ports
from flowgrpo_rollout_sglang.sidecar import write_sidecar

from .lives import Life, publishing_rank_main, rank_main
from .processes import PROCESSES

MODES = {
    "full": {},
    "lora": {"fsdp_trainable_mode": "lora", "lora_rank": 4, "lora_alpha": 8.0, "lora_merge_mode": True},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)]


def config_of(mode, device, model_folder):
    common = {"fsdp_param_dtype": "fp32", "lr": 1e-3, "eps_clip": 1e-3, "lr_warmup_iters": 6, "replay_join": 6}
    common |= {"replay_compile": False}  # on a GPU: a minute for each shape, and held to in test_gpu_replay
    return ActorConfig(
        model_path=str(model_folder),
        sampling=SAMPLING,
        n_samples_per_prompt=4,
        device=device,
        **(common | MODES[mode]),
    )


@pytest.fixture(scope="module")
def sidecars(model_folder, tmp_path_factory):
    """Of four rollouts, drawn with the untrained policy."""
    folder = tmp_path_factory.mktemp("rollouts")
    adapter = QwenImageAdapter(model_folder)
    policy = QwenImageTransformer2DModel.from_pretrained(model_folder / "transformer")
    paths = []
    for rollout in range(4):
        drawn = draw_rollout(policy, adapter, group_size=4, text_tokens=(7, 7), rollout_id=rollout)
        paths.append([folder / f"{rollout}_{group}.safetensors" for group in range(len(drawn))])
        for path, trajectory in zip(paths[-1], drawn, strict=True):
            write_sidecar(path, trajectory)
    return paths


def live(world, lives, sidecars, folder):
    """Runs `lives` on `world` ranks, all of which end by SIGKILL; what each life left, by its name."""
    ranks = [
        PROCESSES.Process(target=rank_main, args=(rank, world, port, lives, sidecars, folder))
        for port in free_ports(1)
        for rank in range(world)
    ]
    join(ranks, ended=-9)
    return {life.name: pickle.loads((folder / f"{life.name}.pkl").read_bytes()) for life in lives}


def join(ranks, ended):
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [ended] * len(ranks)


@pytest.fixture(scope="module", params=DEVICES)
def lives(request, model_folder, sidecars, tmp_path_factory):
    """Every life of the tests below, on two ranks, then on one, then on two again."""
    folder = tmp_path_factory.mktemp("lives")
    config = {mode: config_of(mode, request.param, model_folder) for mode in MODES}
    first, alone, again = [], [], []
    for mode, c in config.items():
        two, one = folder / f"{mode}-of-two", folder / f"{mode}-of-one"
        first += [Life(f"{mode} whole", c, updates=(0, 1, 2, 3)), Life(f"{mode} killed", c, updates=(0, 1), save=two)]
        alone += [Life(f"{mode} on one rank", c, load=two, updates=(), save=one)]
        again += [Life(f"{mode} resumed", c, load=two, updates=(2, 3)), Life(f"{mode} on two ranks", c, load=one)]
    left = live(2, first, sidecars, folder)
    left |= live(1, alone, sidecars, folder)
    return left | live(2, again, sidecars, folder)


def differing(left, right):
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_that_were_killed_and_resumed_end_as_the_run_that_was_not_bit_for_bit(lives, mode):
    whole, killed, resumed = (lives[f"{mode} {life}"] for life in ("whole", "killed", "resumed"))
    assert differing(killed.ended, resumed.loaded) == []
    assert killed.curve + resumed.curve == whole.curve
    assert differing(whole.ended, resumed.ended) == []
    assert differing(killed.ended, whole.ended) != []
    assert resumed.lr_scheduler_steps == whole.lr_scheduler_steps == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_of_two_ranks_is_the_same_state_on_one_and_back_on_two(lives, mode):
    killed, one, two = (lives[f"{mode} {life}"] for life in ("killed", "on one rank", "on two ranks"))
    assert differing(killed.ended, one.loaded) == []
    assert differing(killed.ended, two.loaded) == []
    assert killed.lr_scheduler_steps == one.lr_scheduler_steps == two.lr_scheduler_steps


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_whose_engine_refuses_does_not_keep_the_others_waiting_and_both_publish_again(
    device, model_folder, sidecars, tmp_path
):
    arguments = (*free_ports(1), config_of("full", device, model_folder), sidecars[0], tmp_path / "left")
    join([PROCESSES.Process(target=publishing_rank_main, args=(rank, *arguments)) for rank in range(2)], ended=0)
    well, behind = (pickle.loads((tmp_path / f"left.{rank}").read_bytes()) for rank in range(2))
    assert (well["reasons"], behind["reasons"]) == (["", ""], ["version", ""])
    assert (well["versions"], behind["versions"]) == ([4, 6], [5, 6])
    assert differing(well["policy"], behind["policy"]) == []
    for rank in (well, behind):
        assert differing(rank["engine"], rank["policy"]) == []
