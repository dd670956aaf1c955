"""One tiny random Qwen-Image folder for all tests of a session; actors of one rank for those of checkpoints."""

import pytest
import torch
import torch.distributed as dist
from flowgrpo_fsdp_actor import ActorConfig, FsdpActor, init_process_group
from flowgrpo_fsdp_actor.testing import SAMPLING, draw_rollout, tiny_qwen_image
from flowgrpo_rollout_sglang.sglang_process import free_ports


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_qwen_image(tmp_path_factory.mktemp("tiny-qwen-image"))


@pytest.fixture(scope="module")
def process_group():
    init_process_group(0, 1, "127.0.0.1", *free_ports(1), "cpu")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def make_actor(model_folder, process_group):
    def make(**settings):
        common = {"fsdp_param_dtype": "fp32", "lr": 1e-3, "eps_clip": 1e-3, "n_samples_per_prompt": 4}
        common |= {"replay_compile": False}
        return FsdpActor(ActorConfig(model_path=str(model_folder), sampling=SAMPLING, **(common | settings)), 0, 1)

    return make


@pytest.fixture(scope="module")
def rollouts(make_actor):
    actor = make_actor()
    return [
        draw_rollout(actor._policy.module, actor._adapter, group_size=4, text_tokens=(7, 7), rollout_id=r)
        for r in range(4)
    ]
