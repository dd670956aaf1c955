"""The stock server, unpatched: every row of rows.py fails on it, so each of those rows has a reason to be.

    pytest -m stock packages/rollout-sglang/tests/sglang

Left out of the ordinary run: a minute of server time that only a new SGLang can change. In bf16, as it runs.
"""

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flowgrpo_rollout_sglang import sglang_engine
from flowgrpo_rollout_sglang.patch import copy, insertions
from flowgrpo_rollout_sglang.sglang_process import ServerProcess

HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = runpy.run_path(str(HERE / "rows.py"))
pytestmark = [pytest.mark.stock, pytest.mark.timeout(900)]

# Without this line stock cannot sleep on a CPU at all, and the row about updates while asleep would say nothing.
GUARD = "import torch\nif not hasattr(torch.cpu, 'empty_cache'): torch.cpu.empty_cache = lambda: None\n"
TEXT_IN_BF16 = ("--text-encoder-precisions", "bf16")


@pytest.fixture(scope="module")
def stock(make_config, tmp_path_factory) -> Iterator:
    """The installed package as it is, checked to be unpatched, on the shipped tiny model."""
    manifest, _ = insertions.load()
    root = copy.installed_root(manifest)
    assert insertions.digests(root, manifest.stock) == dict(manifest.stock), "the installed SGLang is patched"
    overlay, loras = tmp_path_factory.mktemp("overlay"), tmp_path_factory.mktemp("loras")
    (overlay / "sitecustomize.py").write_text(GUARD)
    config = make_config("stock", dtype="bf16")
    environment = sglang_engine.ENVIRONMENT | (sglang_engine.CPU_ENVIRONMENT if DEVICE == "cpu" else {})
    server = ServerProcess(
        "stock",
        overlay,
        # stock hands the text encoder's output to the transformer as it is, so both must have one format
        [*sglang_engine.server_arguments(config, str(Path(config.model_path).resolve())), *TEXT_IN_BF16],
        environment,
        overlay / "stock.log",
    )
    server.start(600)
    yield ROWS["Server"](
        client=server.client,
        moments=_own_moments,
        stock=True,
        folder=loras,
        always={
            "generator_device": DEVICE,
            "true_cfg_scale": 1.0,
            "rollout_debug_mode": True,
            "rollout_return_denoising_env": True,
            "rollout_return_dit_trajectory": True,
        },
    )
    server.stop()


def _own_moments(item: dict, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock's own mean and std of step k: what it took its log-prob from."""
    debug = item["rollout_debug_tensors"]
    return debug["rollout_prev_sample_means"][None, k].float(), debug["rollout_noise_std_devs"][k].double().flatten()


@pytest.mark.parametrize("row", [*ROWS["ROWS"], *ROWS["ADAPTER_ROWS"]], ids=lambda row: row.__name__)
def test_stock_fails(stock, row):
    with pytest.raises(AssertionError):
        row(stock)


@pytest.mark.skipif(DEVICE != "cuda", reason="on a CPU stock draws several outputs")
@pytest.mark.parametrize("row", ROWS["CUDA_ROWS"], ids=lambda row: row.__name__)
def test_stock_fails_on_a_gpu(stock, row):
    with pytest.raises(AssertionError):
        row(stock)
