"""One tiny random Qwen-Image folder for all tests of a session."""

import pytest
import torch
from flowgrpo_fsdp_actor.testing import tiny_qwen_image


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_qwen_image(tmp_path_factory.mktemp("tiny-qwen-image"))
