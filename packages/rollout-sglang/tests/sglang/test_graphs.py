"""CUDA graphs of a forward: the bits of a plain call, through every way in which weights move.

The server tests of this folder run with graphs, too, on a GPU: there syncs, sleep and LoRA go through the server.
"""

import os
import pickle
from collections.abc import Iterator

import pytest
import torch
from flowgrpo_rollout_sglang.config import EngineConfig
from flowgrpo_rollout_sglang.engine import EngineError
from flowgrpo_rollout_sglang.server.adapter import Adapter
from flowgrpo_rollout_sglang.server.contract import GRAPHS_VARIABLE, parse
from flowgrpo_rollout_sglang.server.fused import ATTENTION, GELU
from flowgrpo_rollout_sglang.server.graphs import ForwardGraphs, GraphCaptureError
from flowgrpo_rollout_sglang.server.memory import Memory
from flowgrpo_rollout_sglang.sglang_engine import server_environment, wave_body
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention

gpu = pytest.mark.gpu
WIDTH = 256
RED, LONG = "a red circle on a blue background", "a green square and a yellow triangle on a grey background"


def test_graphs_are_for_one_gpu_unless_they_are_left_out():
    def asked(**settings: object) -> str:
        return server_environment(EngineConfig(name="e", model_path="m", **settings))[GRAPHS_VARIABLE]

    assert (asked(device="cpu"), asked(device="cuda"), asked(device="cuda", num_gpus=2)) == ("0", "1", "0")
    assert asked(device="cuda", cuda_graphs=False) == "0"
    for impossible in ({"device": "cpu"}, {"device": "cuda", "num_gpus": 2}):
        with pytest.raises(EngineError):
            asked(cuda_graphs=True, **impossible)


def test_a_capture_error_survives_pickling():
    error = pickle.loads(pickle.dumps(GraphCaptureError("x [2, 3]", "it waited")))
    assert (error.shapes, error.reason) == ("x [2, 3]", "it waited")


# ---------------------------------------------------------------------- graphs of a small network


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(4)]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


@pytest.fixture
def graphs(network) -> Iterator[ForwardGraphs]:
    def forward(layout: object, x: Tensor, bias: Tensor | None) -> Tensor:
        return network(x) if bias is None else network(x) + bias

    made = ForwardGraphs(forward, network.parameters, capacity=3)
    with torch.inference_mode():
        yield made
        made.drop()


def inputs(rows: int, *, biased: bool = False, seed: int = 1) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator).to("cuda", torch.bfloat16)
    return {"x": x, "bias": x.square() if biased else None}


def assert_same_bits(graphs: ForwardGraphs, rows: int, calls: int = 3, **more: bool) -> None:
    """Several calls, each with inputs of its own, against the plain forward."""
    for seed in range(calls):
        given = inputs(rows, seed=seed, **more)
        assert torch.equal(graphs(rows, given), graphs._forward(rows, **given))


@gpu
def test_a_replay_has_the_bits_of_a_plain_call(graphs):
    for rows in (1, 7, 64):
        for biased in (False, True):
            graphs.drop()
            assert_same_bits(graphs, rows, biased=biased)
            assert graphs.recorded == 1


@gpu
def test_the_second_call_records_and_inputs_that_are_left_out_are_other_shapes(graphs):
    graphs(1, inputs(1))
    assert graphs.recorded == 0
    graphs(1, inputs(1))
    assert graphs.recorded == 1
    assert_same_bits(graphs, 1, biased=True)
    assert graphs.recorded == 2


@gpu
def test_the_shapes_that_were_not_used_for_longest_are_forgotten(graphs):
    for rows in (1, 2, 3, 1, 4):
        assert_same_bits(graphs, rows)
    assert [key[0] for key in graphs._kept] == [3, 1, 4]
    for rows in (1, 3, 4, 2):  # those that are still there share their memory with those that came and went
        assert_same_bits(graphs, rows)


@gpu
def test_weights_written_in_place_are_seen_by_a_replay(graphs, network):
    assert_same_bits(graphs, 8)
    held = graphs.recorded
    for parameter in network.parameters():
        parameter.mul_(1.5)
    graphs.check_weights()
    assert graphs.recorded == held
    assert_same_bits(graphs, 8)


@gpu
def test_weights_with_other_memory_make_graphs_start_anew(graphs, network):
    assert_same_bits(graphs, 8)
    elsewhere = network[0][0].weight.clone()
    network[0][0].weight.data = elsewhere + 1.0
    graphs.check_weights()
    assert graphs.recorded == 0
    assert_same_bits(graphs, 8)


@gpu
def test_dropped_graphs_give_their_memory_back(graphs):
    """All of it: the graphs' pool, cuBLAS's workspace, and the tensors of the graph that was recorded last."""
    sizes = (40_000, 30_000, 20_000)
    for rows in sizes:
        graphs._forward(rows, **inputs(rows))
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        for rows in sizes:
            assert_same_bits(graphs, rows, calls=2)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() > before + 50 * 2**20
        graphs.drop()
        assert torch.cuda.memory_reserved() <= before + 2 * 2**20  # a segment of small tensors


@gpu
def test_a_forward_that_waits_is_an_error_and_other_shapes_and_plain_work_go_on():
    def forward(layout: str, x: Tensor) -> Tensor:
        return x * float(x.sum()) if layout == "waits" else x * 2

    graphs = ForwardGraphs(forward, lambda: ())
    x = torch.ones(3, device="cuda")
    with torch.inference_mode():
        assert graphs("waits", {"x": x}).tolist() == [3.0, 3.0, 3.0]
        for _ in range(2):
            with pytest.raises(GraphCaptureError) as error:
                graphs("waits", {"x": x})
            assert "x [3]" in error.value.shapes
            assert (x + 1).sum().item() == 6.0
        for _ in range(3):
            assert graphs("works", {"x": x}).tolist() == [2.0, 2.0, 2.0]
        assert graphs.recorded == 1
        graphs.drop()


@gpu
def test_cublas_gelu_is_the_one_that_it_replaces():
    x = torch.linspace(-6, 6, WIDTH, device="cuda", dtype=torch.bfloat16)[None].repeat(
        2, 1
    )  # one row would not be fused
    eye, zeros = torch.eye(WIDTH, device="cuda", dtype=torch.bfloat16), x.new_zeros(WIDTH)
    fused = torch._addmm_activation(zeros, x, eye.t(), use_gelu=True).float()
    # bf16's rounding, and that of a tanh of 11 bits near -1, as GPUs have it
    torch.testing.assert_close(fused, gelu(x.float(), approximate="tanh"), atol=2e-3, rtol=2**-8)


LENGTHS = [(1,), (7, 7), (3, 8), (11, 17, 1), (64, 33), (127, 100, 5, 63), (200, 1)]
"""Text tokens of each candidate."""


@gpu
@pytest.mark.parametrize("heads_and_width", [(2, 64), (24, 128)], ids=str)
@pytest.mark.parametrize("texts", LENGTHS, ids=str)
@pytest.mark.parametrize("image", [16, 576])
def test_cudnns_attention_is_that_of_each_candidate_alone_whatever_the_lengths(heads_and_width, texts, image):
    """With the mask of a padded wave, against float64 over the real tokens alone; drawn anew in each session."""
    heads, width = heads_and_width
    shape = (len(texts), max(texts) + image, heads, width)  # as SGLang has them
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    real = torch.ones(len(texts), max(texts) + image, dtype=torch.bool, device="cuda")
    for row, text in enumerate(texts):
        real[row, text : max(texts)] = False
    bias = ((real.to(q.dtype) - 1.0) * torch.finfo(q.dtype).max)[:, None, None]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = scaled_dot_product_attention(q, k, v, attn_mask=None if len(set(texts)) == 1 else bias)
    for row, kept in enumerate(real):
        alone = scaled_dot_product_attention(*(x[row, :, kept].double() for x in (q, k, v)))
        torch.testing.assert_close(found[row, :, kept].double(), alone, atol=8e-3, rtol=2**-7)


# ---------------------------------------------------------------------- graphs of SGLang's transformer


@pytest.fixture(scope="module")
def sampler(model_folder) -> Iterator:
    """The server's sampler on the tiny model in bf16, in this process, with graphs."""
    from flowgrpo_rollout_sglang.testing import load_sampler

    before = dict(os.environ)
    yield load_sampler(EngineConfig(name="graphs", model_path=model_folder, device="cuda", cuda_graphs=True))
    torch.distributed.destroy_process_group()  # SGLang's, of this one process
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def draw(sampler, make_request):
    """All that a wave gives, drawn with graphs or without."""

    def drawn(*prompts: str, ids: tuple[str, ...] = ("a", "b", "c"), graphs: bool = True) -> list[Tensor]:
        requests = [make_request(prompt, ids=ids, group_index=g) for g, prompt in enumerate(prompts)]
        kept = sampler.graphs
        sampler.graphs = kept if graphs else None
        try:
            _, groups, _ = sampler.draw(parse(wave_body(requests)))
        finally:
            sampler.graphs = kept
        return [tensor for group in groups for tensor in vars(group).values()]

    return drawn


def assert_alike(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prompts", [(RED,), (RED, LONG)], ids=["one length", "padded"])
@pytest.mark.parametrize("ids", [("a",), ("a", "b", "c", "d", "e")], ids=len)
def test_a_wave_has_the_same_bits_with_and_without_graphs_first_and_later(sampler, draw, prompts, ids):
    plain = draw(*prompts, ids=ids, graphs=False)
    sampler.drop_graphs()
    for _ in range(2):  # the first runs its first step plainly, the second replays every step
        assert_alike(draw(*prompts, ids=ids), plain)
    assert sampler.graphs.recorded == 1


@gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prompts", [(RED,), (RED, LONG)], ids=["one length", "padded"])
def test_cudnn_and_the_fused_gelu_draw_what_sglangs_own_modules_draw(sampler, draw, prompts):
    assert (sampler.attention, sampler.fused_gelu) == ("cudnn", True)
    ours = draw(*prompts, graphs=False)
    kinds = ATTENTION, GELU
    replaced = {m: vars(m).pop("forward") for m in sampler.transformer.modules() if type(m).__name__ in kinds}
    assert len(replaced) == 3 * len(sampler.transformer.transformer_blocks)
    own = draw(*prompts, graphs=False)
    for module, forward in replaced.items():
        module.forward = forward
    for a, b in zip(ours, own, strict=True):
        assert a.dtype == b.dtype
        # Latents of a dozen bf16 forwards, pictures of 255 steps: a wrong product would be off by the range itself.
        assert float((a.float() - b.float()).abs().mean()) <= 0.05 * float(b.float().abs().mean())


@gpu
@pytest.mark.timeout(900)
def test_after_a_sync_in_place_the_same_graphs_draw_from_the_new_weights(sampler, draw):
    old = draw(RED)
    recorded = sampler.graphs.recorded
    with torch.no_grad():
        for parameter in sampler.transformer.parameters():
            parameter.mul_(1.01)
    new = draw(RED)
    assert sampler.graphs.recorded == recorded
    assert not torch.equal(new[0], old[0])
    assert_alike(new, draw(RED, graphs=False))


@gpu
@pytest.mark.timeout(900)
def test_asleep_there_are_no_graphs_and_after_waking_the_draws_are_the_same(sampler, draw):
    before = draw(RED)
    memory = Memory({"weights": [sampler.transformer]}, sampler.drop_graphs)
    memory.release(None)
    assert sampler.graphs.recorded == 0
    pushed_aside = torch.empty(2**20, device="cuda")  # so that the weights come back to other addresses
    memory.resume(None)
    for _ in range(2):
        assert_alike(draw(RED), before)
    del pushed_aside


@gpu
@pytest.mark.timeout(900)
def test_an_adapter_is_in_the_graphs_and_its_sync_in_place_as_well(sampler, draw):
    base = draw(RED)
    sampler.drop_graphs()
    adapter = Adapter(sampler.transformer, 4, 8.0, ["attn.to_q", "attn.to_out.0"])
    assert_alike(draw(RED), base)  # B is zero
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for target in adapter.targets().values():
            target.copy_(0.2 * torch.randn(target.shape, generator=generator))
    recorded = sampler.graphs.recorded
    adapted = draw(RED)
    assert sampler.graphs.recorded == recorded == 1
    assert not torch.equal(adapted[0], base[0])
    assert_alike(adapted, draw(RED, graphs=False))
    sampler.drop_graphs()
    adapter.remove()
    assert_alike(draw(RED), base)
