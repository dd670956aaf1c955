"""One patched server for the whole session, in fp32, and the in-process engine beside it.

Both run on the GPU where there is one. The tests that use the server then carry the marker `gpu`, so `-m gpu` runs
them there; without a GPU they belong to the ordinary suite.
"""

import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flowgrpo_math.sigmas import qwen_image_sigmas
from flowgrpo_math.transition import flow_sde_transition_moments
from flowgrpo_rollout_sglang.config import EngineConfig, SamplingConfig
from flowgrpo_rollout_sglang.request import GroupRequest
from flowgrpo_rollout_sglang.velocity import qwen_image_velocity

HERE = Path(__file__).parent
ROWS = runpy.run_path(str(HERE / "rows.py"))
SIDE, STEPS = 32, 8
TOKENS = (SIDE // 8) ** 2
# For the servers: with so small a model a second thread only waits, and spins while it does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SERVED = {"engine", "started"}
"""Fixtures that start a server."""
RANKED = "ranks"
"""The fixture that starts one of two ranks, which needs a GPU for each."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` selects: on a GPU machine a test that starts a server is a GPU test."""
    if DEVICE == "cuda":
        for item in items:
            fixtures = set(getattr(item, "fixturenames", ())) if HERE in item.path.parents else set()
            if RANKED in fixtures:
                item.add_marker(pytest.mark.multigpu)
            elif SERVED & fixtures:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def model_folder() -> str:
    """The tiny trained Qwen-Image that ships with the trainer; a relative path, as a user types it."""
    folder = HERE.parents[3] / "apps/trainer/src/flowgrpo_trainer/assets/tiny-qwen-image"
    return os.path.relpath(folder)


@pytest.fixture(scope="session")
def make_config(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineConfig]:
    logs = str(tmp_path_factory.mktemp("logs"))

    def make(name: str, dtype: str = "fp32", **more: object) -> EngineConfig:
        return EngineConfig(
            name=name, device=DEVICE, dtype=dtype, log_folder=logs, **{"model_path": model_folder, "num_gpus": 1} | more
        )

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
def draw_adapter() -> Callable[..., dict[str, torch.Tensor]]:
    """Rank 4 for the layers whose names end with one of `targets`, with wire names, beside their weights."""

    def draw(weights: dict[str, torch.Tensor], targets: tuple[str, ...]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        found = {}
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module.endswith(targets):
                for factor, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                    found[f"{module}.lora_{factor}.weight"] = 0.2 * torch.randn(shape, generator=generator).to(weight)
        return found

    return draw


@pytest.fixture(scope="session")
def replay() -> Callable:
    """`replay_differences` of parity.py beside this file."""
    return runpy.run_path(str(HERE / "parity.py"))["replay_differences"]


@pytest.fixture
def contract(engine, replay_moments) -> Iterator:
    """The patched server as rows.py asks it. A row may give it weights, so the engine is told their version after."""
    yield ROWS["Server"](client=engine._loaded().client, moments=replay_moments)
    engine.policy_version = engine.info()["policy_version"]


@pytest.fixture(scope="session")
def replay_moments(oracle) -> Callable:
    """Mean and std of a step of an item of rows.py, by replay through the in-process engine's transformer."""

    @torch.no_grad()
    def moments(item: dict, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        sigmas = item["dit_trajectory"]["sigmas"]
        x = ROWS["latents"](item)[None, k].to(DEVICE)
        velocity = qwen_image_velocity(
            oracle._loaded().transformer,
            x,
            torch.tensor([sigmas[k]], device=DEVICE),
            ROWS["embeds"](item)[None].to(DEVICE),
            None,
            height=SIDE,
            width=SIDE,
            vae_scale_factor=4,
        )
        mean, std = flow_sde_transition_moments(x, velocity, sigmas[k], sigmas[k + 1], eta=0.7)
        return mean.cpu(), std.cpu()

    return moments
