"""One patched server for the whole session, in fp32 on the CPU, and the in-process engine beside it."""

import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flowgrpo_math.sigmas import qwen_image_sigmas
from flowgrpo_rollout_sglang.config import EngineConfig, SamplingConfig
from flowgrpo_rollout_sglang.request import GroupRequest

HERE = Path(__file__).parent
SIDE, STEPS = 32, 8
TOKENS = (SIDE // 8) ** 2


@pytest.fixture(scope="session")
def model_folder() -> str:
    """The tiny trained Qwen-Image that ships with the trainer; a relative path, as a user types it."""
    folder = HERE.parents[3] / "apps/trainer/src/flowgrpo_trainer/assets/tiny-qwen-image"
    return os.path.relpath(folder)


@pytest.fixture(scope="session")
def make_config(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineConfig]:
    logs = str(tmp_path_factory.mktemp("logs"))

    def make(name: str, dtype: str = "fp32", **more: object) -> EngineConfig:
        return EngineConfig(name=name, model_path=model_folder, dtype=dtype, log_folder=logs, **more)

    return make


@pytest.fixture(scope="session")
def started() -> list:
    """Engines that run now. A small machine holds one server at a time, so whoever needs another stops these."""
    return []


@pytest.fixture(scope="session")
def engine(make_config, started) -> Iterator:
    """The server's engine, started once. A test that writes weights must not rely on what they were before."""
    from flowgrpo_rollout_sglang.engine import SGLangNativeGenerationEngine

    engine = SGLangNativeGenerationEngine(make_config("served"))
    engine.start()
    started.append(engine)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def oracle(make_config):
    """The in-process engine on the same model in the same number format."""
    from flowgrpo_rollout_sglang.diffusers_engine import DiffusersEngine

    oracle = DiffusersEngine(make_config("oracle"))
    oracle.start()
    return oracle


@pytest.fixture
def make_request() -> Callable[..., GroupRequest]:
    def make(
        prompt: str = "a red circle on a blue background",
        ids: tuple[str, ...] = ("a", "b"),
        sde_type: str = "sde",
        steps: tuple[int, ...] = (1, 3, 5, 7),
        group_index: int = 0,
        **sampling: object,
    ) -> GroupRequest:
        settings = {"height": SIDE, "width": SIDE, "num_inference_steps": STEPS} | sampling
        return GroupRequest(
            group_index=group_index,
            prompt=prompt,
            sample_ids=ids,
            sampling=SamplingConfig(sde_type=sde_type, sde_indices=steps, **settings),
            sigmas=tuple(qwen_image_sigmas(STEPS, TOKENS).tolist()),
            sde_indices=steps,
            noise_seed=77,
        )

    return make


@pytest.fixture(scope="session")
def replay() -> Callable:
    """`replay_differences` of parity.py beside this file."""
    return runpy.run_path(str(HERE / "parity.py"))["replay_differences"]
