"""The stock server, unpatched: every row of rows.py fails on it, so each of those rows has a reason to be.

    pytest -m stock packages/rollout-sglang/tests/sglang

Left out of the ordinary run: a quarter of a minute that only a new SGLang can change. In bf16, as stock runs.
"""

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flowgrpo_rollout_sglang.testing import start_stock_server

HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = runpy.run_path(str(HERE / "rows.py"))
pytestmark = [pytest.mark.stock, pytest.mark.timeout(900)]
SEVERAL_OUTPUTS = {
    "an_outputs_noise_does_not_depend_on_how_many_there_are",
    "conditions_have_one_shape_for_any_number_of_outputs",
    "each_output_tells_its_own_seed",
}
"""Rows that ask for several outputs, which stock on a GPU does not serve at all."""


@pytest.fixture(scope="module")
def stock(make_config, tmp_path_factory) -> Iterator:
    """The installed package on the shipped tiny model."""
    server = start_stock_server(make_config("stock", dtype="bf16"))
    yield ROWS["Server"](
        client=server.client,
        moments=_own_moments,
        stock=True,
        folder=tmp_path_factory.mktemp("loras"),
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
    if DEVICE == "cuda" and row.__name__ in SEVERAL_OUTPUTS:
        with pytest.raises(ROWS["NotServedError"], match="expanded size of the tensor"):
            row(stock)
        return
    with pytest.raises(AssertionError):
        row(stock)


@pytest.mark.skipif(DEVICE != "cuda", reason="on a CPU stock draws several outputs")
@pytest.mark.parametrize("row", ROWS["CUDA_ROWS"], ids=lambda row: row.__name__)
def test_stock_fails_on_a_gpu(stock, row):
    with pytest.raises(AssertionError):
        row(stock)
